-- Note that a gateway is there, count the gateways, and tell the time. The clock is Redis's.
-- KEYS: zset of gateways by when they were last here (unix s)
-- ARGV: gateway or '' (count only), how long a gateway counts after it was last here (s), the time to
--   tell (unix s; negative: Redis's)
-- Reply: {how many gateways there are, the time (unix ms)}
local time = redis.call('TIME')
local now, told = tonumber(time[1]), tonumber(ARGV[3])
if told < 0 then told = now + tonumber(time[2]) / 1000000 end
if ARGV[1] ~= '' then redis.call('ZADD', KEYS[1], now, ARGV[1]) end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - tonumber(ARGV[2]))
redis.call('EXPIRE', KEYS[1], math.ceil(tonumber(ARGV[2])))
return {redis.call('ZCARD', KEYS[1]), math.floor(told * 1000)}
