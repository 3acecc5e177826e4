"""The moves of a job, each atomic in Redis, and each repeatable: its answer may get lost on the way."""

from __future__ import annotations

from typing import Final

from .common import COMMON

_ACCEPT = """
local now, id, owner, tier, priority = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local deadline, idem, digest, max_queue, max_open = ARGV[6], ARGV[7], ARGV[8], tonumber(ARGV[9]), tonumber(ARGV[10])
local record = key('job', id)
if redis.call('EXISTS', record) == 1 then return {'accepted', id} end  -- this very call, repeated
local lock = idem ~= '' and key('idem', owner, idem) or ''
if lock ~= '' then
  local known = redis.call('HMGET', lock, 'id', 'digest')
  if known[1] then return {known[2] == digest and 'known' or 'conflict', known[1]} end
end
local batch = ''
for at = 12, #ARGV, 2 do if ARGV[at] == 'batch' then batch = ARGV[at + 1] end end
if batch ~= '' and redis.call('HGET', key('batch', batch), 'state') ~= 'in_progress' then return {'batch_over', ''} end
if redis.call('XLEN', queue(tier, priority)) >= max_queue then return {'queue_full', ''} end
if redis.call('ZCARD', key('open', owner)) >= max_open then return {'owner_full', ''} end
redis.call('HSET', record, 'id', id, 'owner', owner, 'tier', tier, 'priority', priority, 'deadline', deadline,
  'idem', lock, 'state', 'queued', 'created', now, 'attempts', 0, 'postponed', 0, 'fence', 0)
for at = 12, #ARGV, 2 do redis.call('HSET', record, ARGV[at], ARGV[at + 1]) end
redis.call('ZADD', key('open', owner), now, id)
if batch == '' then
  redis.call('ZREMRANGEBYSCORE', key('jobs', owner), '-inf', ARGV[11])
  redis.call('ZADD', key('jobs', owner), now, id)
end
redis.call('ZADD', key('deadlines'), deadline, id)
redis.call('SADD', key('tiers'), tier)
if lock ~= '' then redis.call('HSET', lock, 'id', id, 'digest', digest) end
enqueue(id, record)
tell(id, 'queued')
return {'accepted', id}
"""

_CLAIM = """
local now, consumer, tier, lease = tonumber(ARGV[1]), ARGV[2], ARGV[3], ARGV[4]
local ttl, dead_ttl, max_dead = ARGV[5], ARGV[6], ARGV[7]
local RANK = {'interactive', 'standard', 'bulk'}
local orphans, empty, found, seen = {}, {}, {}, {}

local function adopt(priority)  -- entries whose worker is silent: it died
  local q, cursor = queue(tier, priority), '0-0'
  orphans[priority] = {}
  repeat
    local r = redis.call('XAUTOCLAIM', q, 'workers', consumer, lease, cursor, 'COUNT', 100)
    cursor = r[1]
    for _, entry in ipairs(r[2]) do table.insert(orphans[priority], entry) end
  until cursor == '0-0'
end

local function next_entry(priority)
  if empty[priority] then return nil end
  if #orphans[priority] > 0 then return table.remove(orphans[priority], 1) end
  local r = redis.call('XREADGROUP', 'GROUP', 'workers', consumer, 'COUNT', 1, 'STREAMS', queue(tier, priority), '>')
  if r then return r[1][2][1] end
  empty[priority] = true
  return nil
end

local function start(priority, entry)
  local id = entry[2][2]
  local record = key('job', id)
  local f = redis.call('HMGET', record, 'entry', 'deadline', 'attempts', 'max_attempts')
  if f[1] ~= entry[1] then  -- ended, purged or queued anew since
    redis.call('XACK', queue(tier, priority), 'workers', entry[1])
    redis.call('XDEL', queue(tier, priority), entry[1])
    return
  end
  if tonumber(f[2]) <= now then
    if move(record, 'expire') then settle(id, record, now, ttl) end
    return
  end
  if tonumber(f[3]) >= tonumber(f[4]) then
    redis.call('HSET', record, 'code', 'worker_lost', 'error', cjson.encode({message =
      'each worker that ran the job was lost', type = 'server_error', code = 'worker_lost'}))
    bury(id, record, now, dead_ttl, max_dead)
    return
  end
  if not move(record, 'claim') then return end
  redis.call('HINCRBY', record, 'fence', 1)
  redis.call('HINCRBY', record, 'attempts', 1)
  redis.call('HSET', record, 'worker', consumer, 'started', now)
  tell(id, 'running')
  table.insert(found, redis.call('HGETALL', record))
end

for _, priority in ipairs(RANK) do
  if redis.call('EXISTS', queue(tier, priority)) == 0 then
    empty[priority], orphans[priority] = true, {}
    table.insert(seen, '0-0')
  else
    adopt(priority)
    local info = redis.call('XINFO', 'STREAM', queue(tier, priority))
    for at = 1, #info, 2 do if info[at] == 'last-generated-id' then table.insert(seen, info[at + 1]) end end
  end
end
local at = 8
while #found < #ARGV - 7 do
  local priority = ARGV[at]
  local entry = priority and next_entry(priority)
  if not entry then
    for _, other in ipairs(RANK) do
      priority, entry = other, next_entry(other)
      if entry then break end
    end
  end
  if not entry then break end
  start(priority, entry)
  at = at + 1
end
-- Of the dead, what does not fit now goes back to nobody: the next claim adopts it at once.
for priority, rest in pairs(orphans) do
  for _, entry in ipairs(rest) do
    redis.call('XCLAIM', queue(tier, priority), 'workers', consumer, 0, entry[1], 'IDLE', lease, 'JUSTID')
  end
end
return {found, seen}
"""

_KEEP = """
local consumer, renew, lost = ARGV[1], ARGV[2], {}
for at = 3, #ARGV, 2 do
  local record = key('job', ARGV[at])
  if not held(record, ARGV[at + 1]) then
    table.insert(lost, ARGV[at])
  elseif renew == '1' then
    local f = redis.call('HMGET', record, 'tier', 'priority', 'entry')
    redis.call('XCLAIM', queue(f[1], f[2]), 'workers', consumer, 0, f[3], 'JUSTID')
  end
end
return lost
"""

_SUCCEED = """
local now, id, fence, ttl, result, cache = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local record = key('job', id)
if not held(record, fence) then
  -- The answer to this very call may have been lost on its way: then it is done.
  local f = redis.call('HMGET', record, 'state', 'fence')
  return f[1] == 'succeeded' and f[2] == fence and 1 or 0
end
move(record, 'succeed')
redis.call('SET', key('result', id), result, 'PX', redis.call('HGET', record, 'ttl') or ttl)
redis.call('HDEL', record, 'error', 'code')
if cache ~= '' then redis.call('HSET', record, 'cache', cache) end
settle(id, record, now, ttl)
return 1
"""

_FAIL = """
local now, id, fence, ttl, fault, code = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local record = key('job', id)
if not held(record, fence) then return 0 end
redis.call('HSET', record, 'error', fault, 'code', code)
move(record, ARGV[7])
settle(id, record, now, ttl)
return 1
"""

_POSTPONE = """
local now, id, fence, due, counts = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local fault, code, dead_ttl, max_dead = ARGV[6], ARGV[7], ARGV[8], ARGV[9]
local record = key('job', id)
if not held(record, fence) then return 0 end
redis.call('HSET', record, 'error', fault, 'code', code)
if counts == '0' then
  redis.call('HINCRBY', record, 'attempts', -1)
  redis.call('HINCRBY', record, 'postponed', 1)
end
local f = redis.call('HMGET', record, 'attempts', 'max_attempts')
if tonumber(f[1]) >= tonumber(f[2]) then
  bury(id, record, now, dead_ttl, max_dead)
  return 2
end
move(record, 'postpone')
leave_queue(record)
redis.call('ZADD', key('waiting'), due, id)
tell(id, 'waiting', fault)
return 1
"""

_RELEASE = """
local id, fence = ARGV[1], ARGV[2]
local record = key('job', id)
if not held(record, fence) then return 0 end
move(record, 'release')
leave_queue(record)
redis.call('HINCRBY', record, 'attempts', -1)
redis.call('HINCRBY', record, 'fence', 1)
enqueue(id, record)
tell(id, 'queued')
return 1
"""

_TICK = """
local now, ttl = ARGV[1], ARGV[2]
local moved = 0
for _, id in ipairs(redis.call('ZRANGEBYSCORE', key('waiting'), '-inf', now, 'LIMIT', 0, 200)) do
  redis.call('ZREM', key('waiting'), id)
  local record = key('job', id)
  if move(record, 'promote') then
    enqueue(id, record)
    tell(id, 'queued')
    moved = moved + 1
  end
end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', key('deadlines'), '-inf', now, 'LIMIT', 0, 200)) do
  local record = key('job', id)
  if move(record, 'expire') then settle(id, record, now, ttl) moved = moved + 1
  else redis.call('ZREM', key('deadlines'), id) end
end
return moved
"""

_CANCEL = """
local now, id, owner, ttl = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local record = key('job', id)
if redis.call('HGET', record, 'owner') ~= owner then return 'absent' end
if redis.call('HGET', record, 'state') == 'cancelled' then return 'cancelled' end
if not move(record, 'cancel') then return 'ended' end
settle(id, record, now, ttl)
return 'cancelled'
"""

_NOTE = """
if not held(key('job', ARGV[1]), ARGV[2]) then return 0 end
tell(ARGV[1], 'progress', ARGV[3])
return 1
"""

TRANSITION_SCRIPTS: Final = {
    "accept": COMMON + _ACCEPT,
    "claim": COMMON + _CLAIM,
    "keep": COMMON + _KEEP,
    "succeed": COMMON + _SUCCEED,
    "fail": COMMON + _FAIL,
    "postpone": COMMON + _POSTPONE,
    "release": COMMON + _RELEASE,
    "tick": COMMON + _TICK,
    "cancel": COMMON + _CANCEL,
    "note": COMMON + _NOTE,
}
