#!lua flags=allow-oom
-- Let the jobs of all blocked tenants try again: limits may have changed. The next refusal blocks their tenant again.
-- ARGV: now (unix ms)
-- Reply: how many tenants
local now, tenants = time_ms(ARGV[1]), redis.call('ZRANGE', key('blocked'), 0, -1)
for _, tenant in ipairs(tenants) do
  redis.call('ZADD', key('blocked'), 'LT', now, tenant)
  redis.call('ZADD', key('trials'), 'XX', 'LT', after(now, TRIAL_MS), tenant)
end
return #tenants
