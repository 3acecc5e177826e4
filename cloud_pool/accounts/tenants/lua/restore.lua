-- Take from a tenant's buckets and budget what a gateway has handed out alone while Redis was away. Buckets may go into
-- debt.
-- KEYS: request bucket, token bucket, reservations, their ends
-- ARGV: now, requests/s, request capacity, requests, tokens/s, token capacity, tokens, then id, fence, micro-USD and
--   lifetime (s) of each reservation
-- Reply: 1
local request_rate, token_rate = tonumber(ARGV[2]), tonumber(ARGV[5])
if request_rate > 0 then
  local left = level(KEYS[1], request_rate, tonumber(ARGV[3])) - tonumber(ARGV[4])
  store(KEYS[1], left, request_rate, tonumber(ARGV[3]))
end
if token_rate > 0 then
  local left = level(KEYS[2], token_rate, tonumber(ARGV[6])) - tonumber(ARGV[7])
  store(KEYS[2], left, token_rate, tonumber(ARGV[6]))
end
for i = 8, #ARGV, 4 do
  reserve(KEYS[3], KEYS[4], now, ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2]), tonumber(ARGV[i + 3]))
end
return 1
