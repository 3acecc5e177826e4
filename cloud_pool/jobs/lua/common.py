"""What all scripts share: the table of states, the names of the keys, and `settle`, the only place where a job ends.

Keys, all below the prefix:

    job:<id>               hash     the record; `fence` rises with each claim, `entry` is its place in the queue
    result:<id>            string   the answer's body
    events:<id>            stream   what happened, for SSE
    queue:<tier>:<prio>    stream   group `workers`; an entry lives until its job is settled or waits
    waiting, deadlines     zset     job by due time and by deadline, unix ms
    open:<owner>           zset     unfinished jobs; jobs:<owner>: all of them; by time of acceptance
    idem:<owner>:<digest>  hash     id and body digest; lives as long as its job's record
    dead                   stream   dead letters
    hook:<id>, hooks       hash, zset     deliveries by due time: the outbox
    batch:<id>             hash     its counts move in the script that ends a line's job
    tiers                  set      that ever had a job, for metrics and moves
"""

from __future__ import annotations

from typing import Final

from ..states import transitions_as_lua

COMMON: Final = (
    transitions_as_lua()
    + """
local P = KEYS[1]
local function key(...) return P .. ':' .. table.concat({...}, ':') end
local function queue(tier, priority) return key('queue', tier, priority) end

-- The next state, or nil where the table has no such row.
local function move(record, event)
  local state = redis.call('HGET', record, 'state')
  if not state then return nil end
  local to = TABLE[state][event]
  if to then redis.call('HSET', record, 'state', to) end
  return to
end

local function tell(id, what, data)
  redis.call('XADD', key('events', id), 'MAXLEN', '~', 500, '*', 'event', what, 'data', data or '')
end

local function leave_queue(record)
  local f = redis.call('HMGET', record, 'tier', 'priority', 'entry')
  if f[3] and f[3] ~= '' then
    redis.call('XACK', queue(f[1], f[2]), 'workers', f[3])
    redis.call('XDEL', queue(f[1], f[2]), f[3])
    redis.call('HSET', record, 'entry', '')
  end
end

local function enqueue(id, record)
  local f = redis.call('HMGET', record, 'tier', 'priority')
  local q = queue(f[1], f[2])
  if redis.call('EXISTS', q) == 0 then redis.call('XGROUP', 'CREATE', q, 'workers', '0', 'MKSTREAM') end
  redis.call('HSET', record, 'entry', redis.call('XADD', q, '*', 'id', id))
end

local function post(id, record, now)
  local f = redis.call('HMGET', record, 'webhook', 'owner', 'fence', 'state', 'traceparent')
  if not f[1] or f[1] == '' then return end
  local hook = id .. '.' .. f[3]
  redis.call('HSET', key('hook', hook), 'job', id, 'owner', f[2], 'url', f[1], 'state', f[4], 'finished', now,
    'tried', 0, 'fence', 0, 'traceparent', f[5] or '')
  redis.call('HSET', record, 'webhook_status', 'pending')
  redis.call('ZADD', key('hooks'), now, hook)
end

-- The job has ended: nothing waits for it any more, and all that it leaves behind gets its time to live.
local function settle(id, record, now, ttl)
  leave_queue(record)
  ttl = redis.call('HGET', record, 'ttl') or ttl
  local f = redis.call('HMGET', record, 'owner', 'batch', 'idem', 'state', 'error')
  redis.call('ZREM', key('waiting'), id)
  redis.call('ZREM', key('deadlines'), id)
  redis.call('ZREM', key('open', f[1]), id)
  redis.call('HSET', record, 'finished', now)
  if f[4] ~= 'dead' then redis.call('HDEL', record, 'body') end  -- what was asked is kept no longer than it is needed
  tell(id, f[4], f[5])
  redis.call('PEXPIRE', record, ttl)
  redis.call('PEXPIRE', key('events', id), ttl)
  if f[3] and f[3] ~= '' then redis.call('PEXPIRE', f[3], ttl) end
  post(id, record, now)
  if f[2] and redis.call('EXISTS', key('batch', f[2])) == 1 then
    local count = f[4] == 'succeeded' and 'completed' or 'failed'
    redis.call('HINCRBY', key('batch', f[2]), count, 1)
    redis.call('HINCRBY', key('batch', f[2]), 'settled', 1)
  end
end

local function bury(id, record, now, ttl, most)
  if not move(record, 'exhaust') then return false end
  local f = redis.call('HMGET', record, 'owner', 'tier', 'attempts', 'code')
  settle(id, record, now, ttl)
  redis.call('HSET', record, 'letter', redis.call('XADD', key('dead'), 'MAXLEN', '~', most, '*',
    'id', id, 'owner', f[1], 'tier', f[2], 'attempts', f[3], 'code', f[4] or ''))
  return true
end

local function held(record, fence)
  local f = redis.call('HMGET', record, 'state', 'fence')
  return f[1] == 'running' and f[2] == fence
end
"""
)
