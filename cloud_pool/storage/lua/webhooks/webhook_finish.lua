#!lua flags=allow-oom
-- Record the outcome of a delivery. Failures in a row open the receiver's breaker; any other answer closes it.
-- ARGV: now (unix ms), delivery id, fence, outcome (delivered | failed | disabled | retried), delay of the next attempt
--   (ms, for retried), how long the URL stays disabled (ms, for disabled), failures that open the breaker (0: this one
--   is not the receiver's), pause of an open breaker (ms)
-- Reply: 1; 0 if the fence is outdated
local now, delivery, fence, outcome = time_ms(ARGV[1]), ARGV[2], ARGV[3], ARGV[4]
local delay, disabled_ttl, threshold, pause = ARGV[5], ARGV[6], tonumber(ARGV[7]), ARGV[8]
local f = redis.call('HMGET', key('webhook', delivery), 'fence', 'owner', 'url')
if f[1] ~= fence then return 0 end
local tenant, receiver = tenant_of(f[2]), receiver_of(f[3])
local state, name = key('webhook_receiver', tenant, receiver), tenant .. ' ' .. receiver
if outcome == 'retried' then
  end_lease(tenant, receiver, delivery)
  redis.call('HINCRBY', key('webhook', delivery), 'attempts', 1)
  redis.call('ZADD', key('webhooks', tenant, receiver), after(now, delay), delivery)
else
  if outcome == 'disabled' then redis.call('SET', disabled_key(f[2], f[3]), '1', 'PX', disabled_ttl) end
  finish(tenant, receiver, delivery, outcome)
end
if outcome == 'delivered' or outcome == 'disabled' then
  redis.call('HSET', state, 'failures', 0)
  redis.call('ZADD', key('webhook_receivers'), 0, name)
elseif threshold > 0 and redis.call('HINCRBY', state, 'failures', 1) >= threshold then
  redis.call('ZADD', key('webhook_receivers'), after(now, pause), name)
end
wake_receiver(tenant, receiver, now)
return 1
