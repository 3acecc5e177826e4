-- Shared by the scripts that claim and finish deliveries or check disabled URLs.

-- End the lease of a delivery. Returns whether it was leased.
local function end_lease(tenant, receiver, delivery)
  redis.call('HDEL', key('webhook_sending', tenant), delivery)
  if redis.call('ZREM', key('webhook_leases', tenant), delivery) == 0 then return false end
  redis.call('HINCRBY', key('webhook_receiver', tenant, receiver), 'running', -1)
  return true
end

-- Remove a delivery and write its outcome into the job's record.
local function finish(tenant, receiver, delivery, outcome)
  local job = redis.call('HGET', key('webhook', delivery), 'job')
  end_lease(tenant, receiver, delivery)
  redis.call('ZREM', key('webhooks', tenant, receiver), delivery)
  redis.call('DEL', key('webhook', delivery))
  redis.call('DECR', key('webhooks_pending'))
  if job and redis.call('EXISTS', key('job', job)) == 1 then
    redis.call('HSET', key('job', job), 'webhook_status', outcome)
  end
end

-- Exists while a URL of this owner is disabled, after it answered 410 Gone.
local function disabled_key(owner, url) return key('webhook_disabled', owner, redis.sha1hex(url)) end
