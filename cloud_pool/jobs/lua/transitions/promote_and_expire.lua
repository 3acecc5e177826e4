#!lua flags=allow-oom
-- Queue waiting jobs that are due and expire unfinished jobs whose deadline passed, at most 200 of each.
-- When a tenant's limit has reset, its parked jobs return to their queues, 100 a second: the next refusal parks them again.
-- ARGV: now (unix ms), ttl (ms)
-- Reply: how many jobs changed
local now, ttl = time_ms(ARGV[1]), ARGV[2]
local changed = 0
redis.call('ZREMRANGEBYSCORE', key('blocked'), '-inf', now)
for _, tenant in ipairs(redis.call('ZRANGEBYSCORE', key('parked'), '-inf', now, 'LIMIT', 0, 100)) do
  local parked = redis.call('ZPOPMIN', key('parked', tenant), 100)
  for i = 1, #parked, 2 do
    if transition(key('job', parked[i]), 'promote') then
      enqueue(parked[i], key('job', parked[i]))
      publish_event(parked[i], 'queued')
      changed = changed + 1
    end
  end
  if redis.call('EXISTS', key('parked', tenant)) == 1 then redis.call('ZADD', key('parked'), after(now, 1000), tenant)
  else redis.call('ZREM', key('parked'), tenant) end
end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', key('waiting'), '-inf', now, 'LIMIT', 0, 200)) do
  redis.call('ZREM', key('waiting'), id)
  local record = key('job', id)
  if transition(record, 'promote') then
    enqueue(id, record)
    publish_event(id, 'queued')
    changed = changed + 1
  end
end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', key('deadlines'), '-inf', now, 'LIMIT', 0, 200)) do
  local record = key('job', id)
  if transition(record, 'expire') then finish_job(id, record, now, ttl) changed = changed + 1
  else redis.call('ZREM', key('deadlines'), id) end
end
return changed
