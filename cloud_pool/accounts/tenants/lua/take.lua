-- Take one request and a number of tokens from a tenant's buckets, if the day's budget is not spent: all or nothing.
-- KEYS: request bucket, token bucket, usage of the day
-- ARGV: now, requests/s, request capacity, tokens/s, token capacity, tokens, budget (micro-USD); a rate or
--   budget of 0 is unlimited
-- Reply: {'' | budget | requests | tokens (what is exhausted), ms to wait}
local request_rate, request_capacity = tonumber(ARGV[2]), tonumber(ARGV[3])
local token_rate, token_capacity, tokens = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local budget = tonumber(ARGV[7])
if budget > 0 and tonumber(redis.call('HGET', KEYS[3], 'micro_usd') or '0') >= budget then return {'budget', 0} end
local requests_left, tokens_left = 0, 0
if request_rate > 0 then
  requests_left = level(KEYS[1], request_rate, request_capacity)
  if requests_left < 1 then return {'requests', math.ceil((1 - requests_left) / request_rate * 1000)} end
end
if token_rate > 0 then
  tokens_left = level(KEYS[2], token_rate, token_capacity)
  if tokens_left < tokens then return {'tokens', math.ceil((tokens - tokens_left) / token_rate * 1000)} end
end
if request_rate > 0 then store(KEYS[1], requests_left - 1, request_rate, request_capacity) end
if token_rate > 0 then store(KEYS[2], tokens_left - tokens, token_rate, token_capacity) end
return {'', 0}
