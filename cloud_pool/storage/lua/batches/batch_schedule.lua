#!lua flags=allow-oom
-- Set the time of a batch's next processing step.
-- ARGV: now (unix ms), id, delay (ms)
-- Reply: 1; 0 if the batch is gone
local now, id, delay = time_ms(ARGV[1]), ARGV[2], ARGV[3]
if redis.call('EXISTS', key('batch', id)) == 0 then redis.call('ZREM', key('batches'), id) return 0 end
redis.call('ZADD', key('batches'), 'XX', after(now, delay), id)
return 1
