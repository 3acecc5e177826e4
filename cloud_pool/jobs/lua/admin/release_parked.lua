#!lua flags=allow-oom
-- Let the parked jobs of all tenants try again: limits may have changed. The next refusal parks them again.
-- Reply: how many tenants
redis.call('DEL', key('blocked'))
local tenants = redis.call('ZRANGE', key('parked'), 0, -1)
for _, tenant in ipairs(tenants) do redis.call('ZADD', key('parked'), 0, tenant) end
return #tenants
