#!lua flags=allow-oom
-- Record the outcome of a delivery.
-- ARGV: now (unix ms), delivery id, fence, outcome (delivered | failed | disabled | retried), delay of the next attempt
--   (ms, for retried), how long the URL stays disabled (ms, for disabled)
-- Reply: 1; 0 if the fence is outdated
local now, delivery, fence, outcome = time_ms(ARGV[1]), ARGV[2], ARGV[3], ARGV[4]
local delay, disabled_ttl = ARGV[5], ARGV[6]
local f = redis.call('HMGET', key('webhook', delivery), 'fence', 'owner', 'url')
if f[1] ~= fence then return 0 end
if outcome == 'retried' then
  redis.call('HINCRBY', key('webhook', delivery), 'attempts', 1)
  redis.call('ZADD', key('webhooks'), after(now, delay), delivery)
  return 1
end
if outcome == 'disabled' then redis.call('SET', disabled_key(f[2], f[3]), '1', 'PX', disabled_ttl) end
finish(delivery, outcome)
return 1
