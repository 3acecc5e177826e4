-- Correct a token bucket by what a request used.
-- KEYS: token bucket
-- ARGV: now, tokens/s, capacity, tokens used beyond the reservation (negative: fewer)
-- Reply: 1
local rate, capacity = tonumber(ARGV[2]), tonumber(ARGV[3])
store(KEYS[1], math.min(capacity, level(KEYS[1], rate, capacity) - tonumber(ARGV[4])), rate, capacity)
return 1
