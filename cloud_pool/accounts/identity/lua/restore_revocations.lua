#!lua flags=allow-oom
-- Write revocations that Redis has lost back into it, after what its last reader had seen.
-- KEYS: epoch, version, nonce, tokens, devices
-- ARGV: epoch and version of the last snapshot, new nonce, number of tokens, then id, expiry (unix, s) of each token,
--   then name, time (unix, s) of each device
local function raise(key, last)
  redis.call('SET', key, string.format('%d', math.max(tonumber(redis.call('GET', key) or 0), tonumber(last)) + 1))
end

local first_device = 5 + 2 * tonumber(ARGV[4])
for i = 5, first_device - 1, 2 do redis.call('ZADD', KEYS[4], ARGV[i + 1], ARGV[i]) end
for i = first_device, #ARGV, 2 do
  -- A device may have been revoked again in the meantime: the later time counts.
  local known = redis.call('HGET', KEYS[5], ARGV[i])
  if not known or tonumber(known) < tonumber(ARGV[i + 1]) then redis.call('HSET', KEYS[5], ARGV[i], ARGV[i + 1]) end
end
raise(KEYS[1], ARGV[1])
raise(KEYS[2], ARGV[2])
redis.call('SET', KEYS[3], ARGV[3])
