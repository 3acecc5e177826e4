#!lua flags=allow-oom
-- Return a running job to its queue, when a worker drains. The run does not count as an attempt.
-- ARGV: now (unix ms), id, fence
-- Reply: 1; 0 if the fence is outdated
local now, id, fence = time_ms(ARGV[1]), ARGV[2], ARGV[3]
local record = key('job', id)
if not holds_lease(record, fence) then return 0 end
transition(record, 'release')
leave_queue(id, record)
redis.call('HINCRBY', record, 'attempts', -1)
redis.call('HINCRBY', record, 'fence', 1)
enqueue(id, record, now)
publish_event(id, 'queued')
return 1
