#!lua flags=allow-oom
-- Count jobs per queue and state.
-- ARGV: now (unix ms)
-- Reply: {{tier, priority, queued, running, time of the oldest queued entry (unix ms, 0 for none)} per queue,
--   dead letters, jobs waiting for their next attempt, webhook deliveries not finished, receivers of these, of which their
--   breaker is open and half-open, now}
local rows = {}
for _, tier in ipairs(redis.call('SMEMBERS', key('tiers'))) do
  for _, priority in ipairs({'interactive', 'standard', 'bulk'}) do
    local q = queue(tier, priority)
    if redis.call('EXISTS', q) == 1 then
      local group, info = redis.call('XINFO', 'GROUPS', q)[1], {}
      for i = 1, #group, 2 do info[group[i]] = group[i + 1] end
      local first = redis.call('XRANGE', q, '(' .. info['last-delivered-id'], '+', 'COUNT', 1)
      local since = first[1] and string.match(first[1][1], '^%d+') or '0'
      table.insert(rows, {tier, priority, redis.call('XLEN', q) - info['pending'], info['pending'], since})
    end
  end
end
local dead, waiting = redis.call('XLEN', key('dead')), redis.call('ZCARD', key('waiting'))
for _, tenant in ipairs(redis.call('ZRANGE', key('parked'), 0, -1)) do
  waiting = waiting + redis.call('ZCARD', key('parked', tenant))
end
local receivers, now = key('webhook_receivers'), time_ms(ARGV[1])
return {rows, dead, waiting, tonumber(redis.call('GET', key('webhooks_pending')) or '0'), redis.call('ZCARD', receivers),
  redis.call('ZCOUNT', receivers, '(' .. now, '+inf'), redis.call('ZCOUNT', receivers, '(0', now), now}
