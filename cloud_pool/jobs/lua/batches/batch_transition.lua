#!lua flags=allow-oom
-- Move a batch to another state. A final state removes its input and gives the rest its time to live.
-- ARGV: now (unix ms), id, new state, 1 if it is final, ttl (ms), number of legal source states, these states,
--   then field, value, ... to set
-- Reply: 2 if it was in that state already, 1 if it moved, 0 for an illegal transition
local now, id, to, final, ttl = time_ms(ARGV[1]), ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local batch, state, legal = key('batch', id), redis.call('HGET', key('batch', id), 'state'), false
if state == to then return 2 end
local sources = tonumber(ARGV[6])
for i = 7, 6 + sources do legal = legal or ARGV[i] == state end
if not legal then return 0 end
redis.call('HSET', batch, 'state', to, to .. '_at', now)
for i = 7 + sources, #ARGV, 2 do redis.call('HSET', batch, ARGV[i], ARGV[i + 1]) end
if final == '1' then
  redis.call('ZREM', key('batches'), id)
  redis.call('DEL', key('batch', id, 'parts'))
  redis.call('PEXPIRE', batch, ttl)
  redis.call('PEXPIRE', key('batch', id, 'custom_ids'), ttl)
else
  redis.call('ZADD', key('batches'), now, id)
end
return 1
