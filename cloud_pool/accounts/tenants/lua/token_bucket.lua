-- Token buckets, shared by take, settle and restore.
-- ARGV[1]: now (s; negative: Redis's clock, so that all gateways share one)
-- No `#!lua` line may precede this text: with one, Redis checks its memory before the script instead of at each write.
local now = tonumber(ARGV[1])
if now < 0 then local time = redis.call('TIME'); now = tonumber(time[1]) + tonumber(time[2]) / 1000000 end

-- The tokens in a bucket now. A bucket that does not exist is full. `rate` in tokens/s.
local function level(key, rate, capacity)
  local stored = redis.call('HMGET', key, 'level', 'at')
  if not stored[1] then return capacity end
  return math.min(capacity, tonumber(stored[1]) + math.max(0, now - tonumber(stored[2])) * rate)
end

-- Store a level. The key expires a minute after the bucket would be full.
local function store(key, value, rate, capacity)
  redis.call('HSET', key, 'level', string.format('%.9f', value), 'at', string.format('%.6f', now))
  redis.call('PEXPIRE', key, math.ceil((capacity - value) / rate * 1000) + 60000)
end
