#!lua flags=allow-oom
-- Do what is due, at most 200 jobs of each kind: jobs of lost workers return to their queues, or are dead letters if all
-- their attempts are used up; tenants whose block has ended take turns again; waiting jobs are queued; unfinished jobs
-- whose deadline passed expire.
-- ARGV: now (unix ms), ttl (ms), dead letter ttl (ms), max dead letters
-- Reply: {how many jobs changed, jobs that expired without running as {id, owner, tier}}
local now, ttl, dead_ttl, max_dead = time_ms(ARGV[1]), ARGV[2], ARGV[3], ARGV[4]
local changed, expired = 0, {}

local function return_lost(id)
  local record = key('job', id)
  local f = redis.call('HMGET', record, 'attempts', 'max_attempts', 'state')
  if f[3] ~= 'running' then return end
  changed = changed + 1
  if not (tonumber(f[1]) and tonumber(f[2])) then
    quarantine(id, record, now, dead_ttl, max_dead)
  elseif tonumber(f[1]) >= tonumber(f[2]) then
    redis.call('HSET', record, 'code', 'worker_lost', 'error', cjson.encode({message =
      'each worker that ran the job was lost', type = 'server_error', code = 'worker_lost'}))
    dead_letter(id, record, now, dead_ttl, max_dead)
  else
    transition(record, 'release')
    enqueue(id, record, now)
    publish_event(id, 'queued')
  end
end

local lease_time = lease_end(0)
each_queue(function(tier, priority)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', leases(tier, priority), '-inf', lease_time, 'LIMIT', 0, 200)) do
    redis.call('ZREM', leases(tier, priority), id)
    return_lost(id)
  end
end)
for _, tenant in ipairs(redis.call('ZRANGEBYSCORE', key('blocked'), '-inf', now)) do
  redis.call('ZREM', key('blocked'), tenant)
  unblock(tenant)
end
-- claim.lua ends the turns of a tenant on trial after each job.
for _, tenant in ipairs(redis.call('ZRANGEBYSCORE', key('trials'), '-inf', after(now, TRIAL_MS))) do
  if not redis.call('ZSCORE', key('blocked'), tenant) then unblock(tenant) end
end
redis.call('ZREMRANGEBYSCORE', key('trials'), '-inf', now)
for _, id in ipairs(redis.call('ZRANGEBYSCORE', key('waiting'), '-inf', now, 'LIMIT', 0, 200)) do
  redis.call('ZREM', key('waiting'), id)
  local record = key('job', id)
  if transition(record, 'promote') then
    enqueue(id, record, now)
    publish_event(id, 'queued')
    changed = changed + 1
  end
end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', key('deadlines'), '-inf', now, 'LIMIT', 0, 200)) do
  local record = key('job', id)
  local f = redis.call('HMGET', record, 'state', 'owner', 'tier')
  if transition(record, 'expire') then
    finish_job(id, record, now, ttl)
    changed = changed + 1
    if f[1] ~= 'running' then table.insert(expired, {id, f[2] or '', f[3] or ''}) end
  else
    redis.call('ZREM', key('deadlines'), id)
  end
end
return {changed, expired}
