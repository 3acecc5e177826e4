-- Take from a tenant's buckets and budget what a gateway has handed out alone while Redis was away. Buckets may go into
-- debt.
-- KEYS: request bucket, token bucket, reservations, their ends, then the mark of each charge whose reply was lost
-- ARGV: now, requests/s, request capacity, requests, tokens/s, token capacity, tokens, number of these charges, then
--   requests and tokens of each, then id, fence, 1e-12 USD and lifetime (s) of each reservation
-- Reply: 1
local request_rate, token_rate = tonumber(ARGV[2]), tonumber(ARGV[5])
local requests, tokens, lost = tonumber(ARGV[4]), tonumber(ARGV[7]), tonumber(ARGV[8])
for i = 1, lost do
  if redis.call('EXISTS', KEYS[4 + i]) == 1 then  -- it was made here, too
    requests = math.max(0, requests - tonumber(ARGV[7 + 2 * i]))
    tokens = math.max(0, tokens - tonumber(ARGV[8 + 2 * i]))
  end
end
if request_rate > 0 then
  local left = level(KEYS[1], request_rate, tonumber(ARGV[3])) - requests
  store(KEYS[1], left, request_rate, tonumber(ARGV[3]))
end
if token_rate > 0 then
  local left = level(KEYS[2], token_rate, tonumber(ARGV[6])) - tokens
  store(KEYS[2], left, token_rate, tonumber(ARGV[6]))
end
for i = 9 + 2 * lost, #ARGV, 4 do
  reserve(KEYS[3], KEYS[4], now, ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2]), tonumber(ARGV[i + 3]))
end
return 1
