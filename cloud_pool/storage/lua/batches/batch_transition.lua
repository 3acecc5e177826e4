#!lua flags=allow-oom
-- Move a batch to another state. A final state publishes its output files, gives its input file back and its record
-- its time to live.
-- ARGV: now (unix ms), id, new state, 1 if it is final, ttl (ms), number of legal source states, these states,
--   then field, value, ... to set
-- Reply: 2 if it was in that state already, 1 if it moved, 0 for an illegal transition
local now, id, to, final, ttl = time_ms(ARGV[1]), ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local batch, legal = key('batch', id), false
local f = redis.call('HMGET', batch, 'state', 'owner', 'input')
if f[1] == to then return 2 end
local sources = tonumber(ARGV[6])
for i = 7, 6 + sources do legal = legal or ARGV[i] == f[1] end
if not legal then return 0 end
redis.call('HSET', batch, 'state', to, to .. '_at', now)
for i = 7 + sources, #ARGV, 2 do redis.call('HSET', batch, ARGV[i], ARGV[i + 1]) end
if final ~= '1' then
  redis.call('ZADD', key('batches'), now, id)
  return 1
end
for _, part in ipairs({'output', 'errors'}) do
  local file = output_file(id, part)
  if redis.call('HGET', key('file', file), 'state') == 'writing' then
    publish_file(file, now, ttl)
    redis.call('HSET', batch, part, file)
  end
end
local input = key('file', f[3])
if redis.call('EXISTS', input) == 1 and redis.call('HINCRBY', input, 'users', -1) <= 0
  and redis.call('HGET', input, 'state') == 'deleted' then redis.call('ZADD', key('file_due'), now, f[3]) end
redis.call('ZREM', key('batches'), id)
redis.call('ZADD', key('tenant_batches', tenant_of(f[2])), after(now, ttl), id)
redis.call('PEXPIRE', batch, ttl)
return 1
