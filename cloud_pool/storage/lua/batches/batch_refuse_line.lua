#!lua
-- Record the next line of a batch as a failed job that never runs. The caller may repeat the call.
-- ARGV: now (unix ms), id, line, offset of the next line in the input file, job id, custom_id, error as JSON, ttl (ms)
-- Reply: 1; 0 if the batch accepts no more lines or another worker went on
local now, id, line, offset, job = time_ms(ARGV[1]), ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5]
local batch = key('batch', id)
local f = redis.call('HMGET', batch, 'state', 'submitted', 'owner', 'endpoint')
if f[1] ~= 'in_progress' or tonumber(f[2]) ~= line - 1 then return 0 end
redis.call('HSET', key('job', job), 'id', job, 'owner', f[3], 'tier', '', 'priority', 'bulk', 'endpoint', f[4],
  'state', 'failed', 'created', now, 'deadline', now, 'finished', now, 'batch', id, 'custom_id', ARGV[6], 'error', ARGV[7])
redis.call('PEXPIRE', key('job', job), ARGV[8])
redis.call('HSET', batch, 'submitted', line, 'offset', offset)
redis.call('HINCRBY', batch, 'ended', 1)
redis.call('HINCRBY', batch, 'failed', 1)
return 1
