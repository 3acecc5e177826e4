-- Add a gateway's new counts of a variant's trial, and tell those of all gateways. The first verdict stays.
-- KEYS: counts, mark of this batch
-- ARGV: how long the counts are kept (s), state of the trial, its reason, then field and amount of each count
-- Reply: all fields and values. A repeated call, whose first reply was lost, adds nothing.
if redis.call('SET', KEYS[2], '1', 'NX', 'EX', 600) then
  for i = 4, #ARGV, 2 do redis.call('HINCRBYFLOAT', KEYS[1], ARGV[i], ARGV[i + 1]) end
end
if ARGV[2] ~= 'running' and redis.call('HSETNX', KEYS[1], 'state', ARGV[2]) == 1 then
  redis.call('HSET', KEYS[1], 'reason', ARGV[3])
end
redis.call('EXPIRE', KEYS[1], ARGV[1])
return redis.call('HGETALL', KEYS[1])
