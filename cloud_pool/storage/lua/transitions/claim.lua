#!lua flags=allow-oom
-- Claim queued jobs for a worker. A job whose deadline passed is finished here. The turns of a tenant on trial end with
-- its first job; upkeep lets it take turns again.
-- ARGV: now (unix ms), consumer, tier, lease (ms), result ttl (ms), dead letter ttl (ms), max dead letters,
--   then one preferred priority per free slot; a slot whose priority is empty takes the most urgent job of the others
-- Reply: {records as HGETALL, with `followed`: 1 if a client follows the job's events, ids of the records that cannot be read, jobs that expired as {id, owner, tier},
--   1 if more may be queued}
local now, consumer, tier, lease = time_ms(ARGV[1]), ARGV[2], ARGV[3], ARGV[4]
local ttl, dead_ttl, max_dead = ARGV[5], ARGV[6], ARGV[7]
local MAX_ENDED, ended = 200, 0
local claimed, unreadable, expired = {}, {}, {}

-- Start a job that has left its queue. Returns whether it runs; else it has ended.
local function start(priority, id)
  local record = key('job', id)
  local f = redis.call('HMGET', record, 'deadline', 'attempts', 'max_attempts', 'owner', 'state')
  if not f[5] then return false end
  if tonumber(f[1]) and tonumber(f[1]) <= tonumber(now) and transition(record, 'expire') then
    finish_job(id, record, now, ttl)
    table.insert(expired, {id, f[4] or '', tier})
    return false
  end
  if not (tonumber(f[1]) and tonumber(f[2]) and tonumber(f[3]) and transition(record, 'claim')) then
    quarantine(id, record, now, dead_ttl, max_dead)
    table.insert(unreadable, id)
    return false
  end
  local fence = redis.call('HINCRBY', record, 'fence', 1)
  redis.call('HINCRBY', record, 'attempts', 1)
  redis.call('HSET', record, 'worker', consumer, 'started', now)
  redis.call('ZADD', leases(tier, priority), lease_end(lease), id)
  publish_event(id, 'running', '', fence)
  local row = redis.call('HGETALL', record)
  table.insert(row, 'followed')
  table.insert(row, redis.call('EXISTS', key('followed', id)))
  table.insert(claimed, row)
  return true
end

-- Take the next job of a priority. Returns false if there is none.
local function take(priority)
  local turns = key('turns', tier, priority)
  local next_turn = redis.call('ZRANGE', turns, 0, 0, 'WITHSCORES')
  local tenant, tag = next_turn[1], tonumber(next_turn[2])
  if not tenant then return false end
  local id = redis.call('ZPOPMIN', queue_of(tenant, tier, priority))[1]
  if id then redis.call('HINCRBY', queue(tier, priority), 'queued', -1) end
  if id and start(priority, id) then
    local virtual = tonumber(redis.call('HGET', queue(tier, priority), 'virtual') or 0)
    redis.call('HSET', queue(tier, priority), 'virtual', math.max(virtual, tag))
    redis.call('ZINCRBY', turns, redis.call('HGET', key('job', id), 'cost') or 1, tenant)
    if redis.call('ZSCORE', key('trials'), tenant) then stop_turns(tenant, tier, priority) end
  else
    ended = ended + 1
  end
  if redis.call('EXISTS', queue_of(tenant, tier, priority)) == 0 then stop_turns(tenant, tier, priority) end
  return true
end

local function take_any(preferred)
  if preferred ~= '' and take(preferred) then return true end
  for _, priority in ipairs(PRIORITIES) do if take(priority) then return true end end
  return false
end

local slots, more = #ARGV - 7, true
while more and #claimed < slots and ended < MAX_ENDED do more = take_any(ARGV[8 + #claimed]) end
if not more then redis.call('DEL', key('wake', tier)) end
return {claimed, unreadable, expired, more and 1 or 0}
