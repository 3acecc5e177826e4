-- Correct a token bucket by what a request used.
-- KEYS: token bucket, mark of this charge
-- ARGV: now, tokens/s, capacity, tokens used beyond the reservation (negative: fewer), how long the mark is kept (ms)
-- Reply: 1; 0 if it was made before
if not redis.call('SET', KEYS[2], '1', 'NX', 'PX', ARGV[5]) then return 0 end
local rate, capacity = tonumber(ARGV[2]), tonumber(ARGV[3])
store(KEYS[1], math.min(capacity, level(KEYS[1], rate, capacity) - tonumber(ARGV[4])), rate, capacity)
return 1
