#!lua flags=allow-oom
-- Lease the batch that has been due the longest.
-- ARGV: now (unix ms), lease (ms)
-- Reply: its id, or '' when none is due
local now, lease = time_ms(ARGV[1]), tonumber(ARGV[2])
local due = redis.call('ZRANGEBYSCORE', key('batches'), '-inf', now, 'LIMIT', 0, 1)
if not due[1] then return '' end
redis.call('ZADD', key('batches'), now + lease, due[1])
return due[1]
