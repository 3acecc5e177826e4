#!lua flags=allow-oom
-- Count jobs per queue and state.
-- ARGV: now (unix ms)
-- Reply: {{tier, priority, queued, running, time of the oldest queued job (unix ms, 0 for none)} per queue, dead letters,
--   jobs waiting for their next attempt, queued jobs of blocked tenants, webhook deliveries not finished, receivers of
--   these, of which their breaker is open and half-open, now}
local rows, all_parked = {}, 0
each_queue(function(tier, priority)
  local total = redis.call('HGET', queue(tier, priority), 'queued')
  if not total then return end
  local queued, oldest = 0, math.huge
  for _, tenant in ipairs(redis.call('ZRANGE', key('turns', tier, priority), 0, -1)) do
    local jobs = queue_of(tenant, tier, priority)
    local first = redis.call('ZRANGE', jobs, 0, 0)[1]
    queued = queued + redis.call('ZCARD', jobs)
    oldest = math.min(oldest, first and tonumber(redis.call('HGET', key('job', first), 'queued') or nil) or math.huge)
  end
  all_parked = all_parked + total - queued
  local running = redis.call('ZCARD', leases(tier, priority))
  table.insert(rows, {tier, priority, queued, running, oldest < math.huge and string.format('%.0f', oldest) or '0'})
end)
local dead, waiting = redis.call('XLEN', key('dead')), redis.call('ZCARD', key('waiting'))
local receivers, now = key('webhook_receivers'), time_ms(ARGV[1])
local deliveries = tonumber(redis.call('GET', key('webhooks_pending')) or '0')
return {rows, dead, waiting, all_parked, deliveries, redis.call('ZCARD', receivers),
  redis.call('ZCOUNT', receivers, '(' .. now, '+inf'), redis.call('ZCOUNT', receivers, '(0', now), now}
