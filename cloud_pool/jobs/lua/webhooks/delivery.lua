-- Shared by the scripts that finish deliveries or check disabled URLs.

-- Remove a delivery and write its outcome into the job's record.
local function finish(delivery, outcome)
  local f = redis.call('HMGET', key('webhook', delivery), 'job')
  redis.call('ZREM', key('webhooks'), delivery)
  redis.call('DEL', key('webhook', delivery))
  if f[1] and redis.call('EXISTS', key('job', f[1])) == 1 then
    redis.call('HSET', key('job', f[1]), 'webhook_status', outcome)
  end
end

-- Exists while a URL of this owner is disabled, after it answered 410 Gone.
local function disabled_key(owner, url) return key('webhook_disabled', owner, redis.sha1hex(url)) end
