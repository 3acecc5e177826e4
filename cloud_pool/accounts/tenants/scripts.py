"""What Redis runs, whole and alone: no two gateways take the same token. Keys of one tenant share a hash slot.

Times come from Redis itself, so that gateways whose clocks differ share one; tests pass a time instead.
"""

from __future__ import annotations

_CLOCK = """
local now = tonumber(ARGV[1])
if now < 0 then local time = redis.call('TIME'); now = tonumber(time[1]) + tonumber(time[2]) / 1000000 end
local function level(key, rate, capacity)
  local was = redis.call('HMGET', key, 'level', 'at')
  if not was[1] then return capacity end
  return math.min(capacity, tonumber(was[1]) + math.max(0, now - tonumber(was[2])) * rate)
end
local function keep(key, value, rate, capacity)
  redis.call('HSET', key, 'level', string.format('%.9f', value), 'at', string.format('%.6f', now))
  redis.call('PEXPIRE', key, math.ceil((capacity - value) / rate * 1000) + 60000)
end
"""

TAKE_SCRIPT = (
    _CLOCK
    + """
-- KEYS requests, tokens, usage of the day; ARGV now, request rate, capacity, token rate, capacity, tokens, budget
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
if request_rate > 0 then keep(KEYS[1], requests_left - 1, request_rate, request_capacity) end
if token_rate > 0 then keep(KEYS[2], tokens_left - tokens, token_rate, token_capacity) end
return {'', 0}
"""
)
"""Both buckets and the day's budget: all of them give, or nothing is taken. Returns what lacked, and ms to wait."""

SETTLE_SCRIPT = (
    _CLOCK
    + """
-- KEYS tokens; ARGV now, rate, capacity, used beyond what was reserved (negative: less)
local rate, capacity = tonumber(ARGV[2]), tonumber(ARGV[3])
keep(KEYS[1], math.min(capacity, level(KEYS[1], rate, capacity) - tonumber(ARGV[4])), rate, capacity)
return 1
"""
)

ADD_USAGE_SCRIPT = """
-- KEYS usage of the day, mark of this batch; ARGV seconds to keep, then field, amount, field, amount …
if not redis.call('SET', KEYS[2], '1', 'NX', 'EX', 86400) then return 0 end
for at = 2, #ARGV, 2 do redis.call('HINCRBY', KEYS[1], ARGV[at], ARGV[at + 1]) end
redis.call('EXPIRE', KEYS[1], ARGV[1])
return 1
"""
"""A batch that is sent again, because its reply was lost, counts once."""


def requests_key(tenant: str) -> str:
    return f"causeway:tenant:{{{tenant}}}:requests"


def tokens_key(tenant: str) -> str:
    return f"causeway:tenant:{{{tenant}}}:tokens"


def usage_key(tenant: str, day: str) -> str:
    """`day` is UTC, 2026-11-21."""
    return f"causeway:tenant:{{{tenant}}}:usage:{day}"


def batch_key(tenant: str, batch: str) -> str:
    return f"causeway:tenant:{{{tenant}}}:batch:{batch}"
