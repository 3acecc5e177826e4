#!lua flags=allow-oom
-- Queue waiting jobs that are due and expire unfinished jobs whose deadline passed, at most 200 of each.
-- ARGV: now (unix ms), ttl (ms)
-- Reply: how many jobs changed
local now, ttl = time_ms(ARGV[1]), ARGV[2]
local changed = 0
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
