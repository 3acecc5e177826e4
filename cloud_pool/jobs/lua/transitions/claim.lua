#!lua flags=allow-oom
-- Claim jobs for a worker: jobs whose lease ran out first, then new ones. An expired job is finished here, and a job
-- without attempts left becomes a dead letter. Jobs of a tenant over a limit are parked, at most 200 at a time.
-- ARGV: now (unix ms), consumer, tier, lease (ms), result ttl (ms), dead letter ttl (ms), max dead letters, then one
--   preferred priority per free slot; a slot whose priority is empty takes the most urgent job of the others
-- Reply: {records as HGETALL, last entry id of each priority's queue (none: claim again, more may be queued), ids of the records that cannot be read}
local now, consumer, tier, lease = tonumber(time_ms(ARGV[1])), ARGV[2], ARGV[3], ARGV[4]
local ttl, dead_ttl, max_dead = ARGV[5], ARGV[6], ARGV[7]
local MAX_PARKED, parked = 200, 0
local PRIORITIES = {'interactive', 'standard', 'bulk'}
local reclaimed, empty, claimed, last_ids, unreadable = {}, {}, {}, {}, {}

-- Collect the entries whose lease ran out: their worker died.
local function reclaim(priority)
  local q, cursor = queue(tier, priority), '0-0'
  reclaimed[priority] = {}
  repeat
    local r = redis.call('XAUTOCLAIM', q, 'workers', consumer, lease, cursor, 'COUNT', 100)
    cursor = r[1]
    for _, entry in ipairs(r[2]) do table.insert(reclaimed[priority], entry) end
  until cursor == '0-0'
end

local function next_entry(priority)
  if empty[priority] then return nil end
  if #reclaimed[priority] > 0 then return table.remove(reclaimed[priority], 1) end
  local r = redis.call('XREADGROUP', 'GROUP', 'workers', consumer, 'COUNT', 1, 'STREAMS', queue(tier, priority), '>')
  if r then return r[1][2][1] end
  empty[priority] = true
  return nil
end

local function start(priority, entry)
  local id = entry[2][2]
  local record = key('job', id)
  local f = redis.call('HMGET', record, 'entry', 'deadline', 'attempts', 'max_attempts', 'owner')
  if f[1] ~= entry[1] then  -- finished, purged or queued again in the meantime
    redis.call('XACK', queue(tier, priority), 'workers', entry[1])
    redis.call('XDEL', queue(tier, priority), entry[1])
    return
  end
  if not (tonumber(f[2]) and tonumber(f[3]) and tonumber(f[4])) then
    quarantine(id, record, now, dead_ttl, max_dead)
    table.insert(unreadable, id)
    return
  end
  if tonumber(f[2]) <= now then
    if transition(record, 'expire') then finish_job(id, record, now, ttl) end
    return
  end
  local release = redis.call('ZSCORE', key('blocked'), tenant_of(f[5] or ''))
  if release and tonumber(release) > now and transition(record, 'park') then
    park(id, record, release)
    publish_instead_of({'queued', 'waiting'}, id, 'waiting')
    parked = parked + 1
    return
  end
  if tonumber(f[3]) >= tonumber(f[4]) then
    redis.call('HSET', record, 'code', 'worker_lost', 'error', cjson.encode({message =
      'each worker that ran the job was lost', type = 'server_error', code = 'worker_lost'}))
    dead_letter(id, record, now, dead_ttl, max_dead)
    return
  end
  if not transition(record, 'claim') then
    quarantine(id, record, now, dead_ttl, max_dead)
    table.insert(unreadable, id)
    return
  end
  redis.call('HINCRBY', record, 'fence', 1)
  redis.call('HINCRBY', record, 'attempts', 1)
  redis.call('HSET', record, 'worker', consumer, 'started', now)
  publish_event(id, 'running')
  table.insert(claimed, redis.call('HGETALL', record))
end

for _, priority in ipairs(PRIORITIES) do
  if redis.call('EXISTS', queue(tier, priority)) == 0 then
    empty[priority], reclaimed[priority] = true, {}
    table.insert(last_ids, '0-0')
  else
    reclaim(priority)
    local info = redis.call('XINFO', 'STREAM', queue(tier, priority))
    for i = 1, #info, 2 do if info[i] == 'last-generated-id' then table.insert(last_ids, info[i + 1]) end end
  end
end
while #claimed < #ARGV - 7 and parked < MAX_PARKED do
  local priority = ARGV[8 + #claimed]
  local entry = priority and next_entry(priority)
  if not entry then
    for _, other in ipairs(PRIORITIES) do
      priority, entry = other, next_entry(other)
      if entry then break end
    end
  end
  if not entry then break end
  start(priority, entry)
end
-- Reclaimed entries that found no slot get an idle time of a whole lease, so that the next claim reclaims them at once.
for priority, rest in pairs(reclaimed) do
  for _, entry in ipairs(rest) do
    redis.call('XCLAIM', queue(tier, priority), 'workers', consumer, 0, entry[1], 'IDLE', lease, 'JUSTID')
  end
end
return {claimed, parked < MAX_PARKED and last_ids or {}, unreadable}
