#!lua flags=allow-oom
-- Let the jobs of all blocked tenants try again: limits may have changed. The next refusal blocks their tenant again.
-- ARGV: now (unix ms)
-- Reply: how many tenants
local now, tenants = time_ms(ARGV[1]), redis.call('ZRANGE', key('blocked'), 0, -1)
for _, tenant in ipairs(tenants) do redis.call('ZADD', key('blocked'), 'LT', now, tenant) end
return #tenants
