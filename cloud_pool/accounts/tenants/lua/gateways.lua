-- Note that a gateway is there, and count the gateways. The clock is Redis's.
-- KEYS: zset of gateways by when they were last here (unix s)
-- ARGV: gateway or '' (count only), how long a gateway counts after it was last here (s)
-- Reply: how many gateways there are
local now = tonumber(redis.call('TIME')[1])
if ARGV[1] ~= '' then redis.call('ZADD', KEYS[1], now, ARGV[1]) end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - tonumber(ARGV[2]))
redis.call('EXPIRE', KEYS[1], math.ceil(tonumber(ARGV[2])))
return redis.call('ZCARD', KEYS[1])
