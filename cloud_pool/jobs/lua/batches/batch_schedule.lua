#!lua flags=allow-oom
-- Set the time of a batch's next processing step.
-- ARGV: id, time (unix ms)
-- Reply: 1; 0 if the batch is gone
if redis.call('EXISTS', key('batch', ARGV[1])) == 0 then redis.call('ZREM', key('batches'), ARGV[1]) return 0 end
redis.call('ZADD', key('batches'), 'XX', ARGV[2], ARGV[1])
return 1
