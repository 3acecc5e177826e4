#!lua flags=allow-oom
-- Erase a batch in any state: it accepts no more lines, and its input file is given back. Its jobs and files stay.
-- ARGV: id
-- Reply: 1; 0 if it is gone
local id = ARGV[1]
local f = redis.call('HMGET', key('batch', id), 'owner', 'input')
if not f[1] then return 0 end
local input = key('file', f[2])
if redis.call('ZREM', key('batches'), id) == 1 and redis.call('EXISTS', input) == 1 then
  redis.call('HINCRBY', input, 'users', -1)
end
redis.call('ZREM', key('batches', f[1]), id)
redis.call('ZREM', key('tenant_batches', tenant_of(f[1])), id)
redis.call('UNLINK', key('batch', id))
return 1
