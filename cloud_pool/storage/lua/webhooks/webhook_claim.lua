#!lua flags=allow-oom
-- Claim due deliveries: tenants take turns, and within a tenant its receivers. A receiver without a free slot, or whose
-- breaker is open, is looked at again when a slot is released or the pause ends, and holds back no other until then.
-- A delivery to a disabled URL, and one that is too old, is finished here.
-- What is damaged holds back no other: a delivery whose record is lost is dropped, and a tenant with data that no step can
-- be taken with is looked at again after ASIDE_MS.
-- ARGV: now (unix ms), lease (ms), limit, slots of a receiver, slots of a tenant, oldest age of a delivery (ms)
-- Reply: {deliveries as HGETALL, each with its id; `fence` was incremented, ids of deliveries that were dropped, tenants
--   that were set aside, each followed by the error}
local now, lease, limit = tonumber(time_ms(ARGV[1])), tonumber(ARGV[2]), tonumber(ARGV[3])
local receiver_slots, tenant_slots, max_age = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local ASIDE_MS, dropped, aside = 60000, {}, {}
local MAX_STEPS, steps, rows = 2000, 0, {}  -- steps: what a call may look at, so that it blocks Redis for milliseconds

local function first_score(set)
  local first = redis.call('ZRANGE', set, 0, 0, 'WITHSCORES')
  return tonumber(first[2])
end

-- Drop a leased delivery whose record is lost. Its receiver, if it is known, gets its slot back.
local function drop_lost(tenant, receiver, delivery)
  if receiver then
    end_lease(tenant, receiver, delivery)
    wake_receiver(tenant, receiver, now)
  else
    redis.call('ZREM', key('webhook_leases', tenant), delivery)
  end
  redis.call('DEL', key('webhook', delivery))
  redis.call('DECR', key('webhooks_pending'))
  local job = string.match(delivery, '^(.*)%.[^.]*$')  -- as in `queue_webhook`
  if job and redis.call('EXISTS', key('job', job)) == 1 then
    redis.call('HSET', key('job', job), 'webhook_status', 'failed')
  end
  table.insert(dropped, delivery)
end

-- Return the deliveries of dead workers to their receivers.
local function recover(tenant)
  for _, delivery in ipairs(redis.call('ZRANGEBYSCORE', key('webhook_leases', tenant), '-inf', now, 'LIMIT', 0, 100)) do
    local url = redis.call('HGET', key('webhook', delivery), 'url')
    local receiver = redis.call('HGET', key('webhook_sending', tenant), delivery) or (url and receiver_of(url))
    if url then
      end_lease(tenant, receiver, delivery)
      redis.call('ZADD', key('webhooks', tenant, receiver), now, delivery)
      wake_receiver(tenant, receiver, now)
    else
      drop_lost(tenant, receiver, delivery)
    end
  end
end

local function start(tenant, receiver, delivery)
  redis.call('ZREM', key('webhooks', tenant, receiver), delivery)
  redis.call('HINCRBY', key('webhook', delivery), 'fence', 1)
  redis.call('ZADD', key('webhook_leases', tenant), now + lease, delivery)
  redis.call('HSET', key('webhook_sending', tenant), delivery, receiver)
  redis.call('HINCRBY', key('webhook_receiver', tenant, receiver), 'running', 1)
  local row = redis.call('HGETALL', key('webhook', delivery))
  for _, value in ipairs({'id', delivery, 'claimed', string.format('%.0f', now)}) do table.insert(row, value) end
  table.insert(rows, row)
end

-- Start one delivery of a receiver, if it may have one now, and note when to look at the receiver again.
local function serve_receiver(tenant, receiver)
  local queue, state = key('webhooks', tenant, receiver), key('webhook_receiver', tenant, receiver)
  local name = tenant .. ' ' .. receiver
  local due, running = first_score(queue), tonumber(redis.call('HGET', state, 'running') or '0')
  local open_until = tonumber(redis.call('ZSCORE', key('webhook_receivers'), name) or '0')
  if not due or running >= (open_until > 0 and 1 or receiver_slots) then
    redis.call('ZREM', key('webhooks', tenant), receiver)  -- the end of a delivery wakes it
    if not due and running <= 0 then
      redis.call('DEL', state)
      redis.call('ZREM', key('webhook_receivers'), name)
    end
    return false
  end
  local at = math.max(due, open_until)
  redis.call('ZADD', key('webhooks', tenant), math.max(at, now), receiver)
  if at > now then return false end
  local delivery = redis.call('ZRANGE', queue, 0, 0)[1]
  local f = redis.call('HMGET', key('webhook', delivery), 'owner', 'url', 'finished')
  if not f[1] or not f[2] then
    finish(tenant, receiver, delivery, 'failed')
  elseif redis.call('EXISTS', disabled_key(f[1], f[2])) == 1 then
    finish(tenant, receiver, delivery, 'disabled')
  elseif tonumber(f[3]) and now - tonumber(f[3]) > max_age then
    finish(tenant, receiver, delivery, 'failed')
  else
    start(tenant, receiver, delivery)
    return true
  end
  return false
end

-- Start one delivery of a tenant, if it may have one now, and note when to look at the tenant again.
local function serve_tenant(tenant)
  recover(tenant)
  local leases = key('webhook_leases', tenant)
  if redis.call('ZCARD', leases) >= tenant_slots then
    redis.call('ZADD', key('webhooks'), first_score(leases), tenant)  -- the end of a delivery wakes it earlier
    return
  end
  repeat
    steps = steps + 1
    local receiver = redis.call('ZRANGEBYSCORE', key('webhooks', tenant), '-inf', now, 'LIMIT', 0, 1)[1]
    if not receiver then
      local work, ends = first_score(key('webhooks', tenant)), first_score(leases)
      if work or ends then redis.call('ZADD', key('webhooks'), math.min(work or ends, ends or work), tenant)
      else redis.call('ZREM', key('webhooks'), tenant) end
      return
    end
    local started = serve_receiver(tenant, receiver)
  until started or steps >= MAX_STEPS
  redis.call('ZADD', key('webhooks'), now, tenant)  -- behind the others that are due
end

while #rows < limit and steps < MAX_STEPS do
  local due = redis.call('ZRANGEBYSCORE', key('webhooks'), '-inf', now, 'LIMIT', 0, limit - #rows)
  if #due == 0 then break end
  for _, tenant in ipairs(due) do
    steps = steps + 1
    local ok, problem = pcall(serve_tenant, tenant)
    if not ok then
      redis.call('ZADD', key('webhooks'), now + ASIDE_MS, tenant)
      table.insert(aside, tenant)
      table.insert(aside, type(problem) == 'table' and problem.err or tostring(problem))
    end
  end
end
return {rows, dropped, aside}
