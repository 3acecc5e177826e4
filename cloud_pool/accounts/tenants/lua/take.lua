-- Take a request's sequences and a number of tokens from a tenant's buckets, and reserve what it may cost of the day's
-- budget: all or nothing.
-- KEYS: request bucket, token bucket, usage of the day, reservations, their ends, mark of this charge
-- ARGV: now, requests/s, request capacity, requests, tokens/s, token capacity, tokens, budget (1e-12 USD), what the
--   request may cost (1e-12 USD), id of the reservation, its fence, its lifetime (s), the day of KEYS[3] (days since
--   1970), how long the mark is kept (ms); a rate of 0 is unlimited, and a cost of 0 needs no budget
-- A repeated call, whose first reply was lost, takes nothing more.
-- Reply: {'' | budget | reserved | requests | tokens (what is exhausted), ms to wait, 1e-12 USD spent, 1e-12 USD
--   reserved}; {day, now (unix ms), 0, 0} if it is another day
local request_rate, request_capacity, requests = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local token_rate, token_capacity, tokens = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local budget, cost, spent, reserved = tonumber(ARGV[8]), tonumber(ARGV[9]), 0, 0
if cost > 0 then
  if math.floor(now / 86400) ~= tonumber(ARGV[13]) then return {'day', math.floor(now * 1000), 0, 0} end
  -- The second field is that of gateways of the previous version, micro-USD.
  local sums = redis.call('HMGET', KEYS[3], 'pico_usd', 'micro_usd')
  spent = tonumber(sums[1] or '0') + 1000000 * tonumber(sums[2] or '0')
  reserved = reserved_by_others(KEYS[4], KEYS[5], now, ARGV[10])
  if spent + cost > budget then return {'budget', 0, spent, reserved} end
  if spent + reserved + cost > budget then return {'reserved', 0, spent, reserved} end
end
if redis.call('EXISTS', KEYS[6]) == 1 then return {'', 0, spent, reserved + cost} end
local requests_left, tokens_left = 0, 0
if request_rate > 0 then
  requests_left = level(KEYS[1], request_rate, request_capacity)
  if requests_left < requests then
    return {'requests', math.ceil((requests - requests_left) / request_rate * 1000), spent, reserved}
  end
end
if token_rate > 0 then
  tokens_left = level(KEYS[2], token_rate, token_capacity)
  if tokens_left < tokens then
    return {'tokens', math.ceil((tokens - tokens_left) / token_rate * 1000), spent, reserved}
  end
end
if request_rate > 0 or token_rate > 0 then redis.call('SET', KEYS[6], '1', 'PX', ARGV[14]) end
if request_rate > 0 then store(KEYS[1], requests_left - requests, request_rate, request_capacity) end
if token_rate > 0 then store(KEYS[2], tokens_left - tokens, token_rate, token_capacity) end
if cost > 0 then reserve(KEYS[4], KEYS[5], now, ARGV[10], ARGV[11], cost, tonumber(ARGV[12])) end
return {'', 0, spent, reserved + cost}
