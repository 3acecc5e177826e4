#!lua flags=allow-oom
-- Erase a delivery, also one that is being sent, and its receiver with the last one.
-- ARGV: id
-- Reply: 1; 0 if it is gone
local f = redis.call('HMGET', key('webhook', ARGV[1]), 'owner', 'url')
if not (f[1] and f[2]) then return redis.call('DEL', key('webhook', ARGV[1])) end
local tenant, receiver = tenant_of(f[1]), receiver_of(f[2])
local state = key('webhook_receiver', tenant, receiver)
finish(tenant, receiver, ARGV[1], 'disabled')
if redis.call('EXISTS', key('webhooks', tenant, receiver)) == 1
  or tonumber(redis.call('HGET', state, 'running') or '0') > 0 then return 1 end
redis.call('DEL', state)
redis.call('ZREM', key('webhook_receivers'), tenant .. ' ' .. receiver)
redis.call('ZREM', key('webhooks', tenant), receiver)
if redis.call('EXISTS', key('webhooks', tenant), key('webhook_leases', tenant)) == 0 then
  redis.call('ZREM', key('webhooks'), tenant)
end
return 1
