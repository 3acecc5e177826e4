#!lua flags=allow-oom
-- Revoke a token or a device, and forget those that nothing can be accepted with any more.
-- KEYS: version, nonce, tokens, devices
-- ARGV: new nonce, then nothing more, or: kind (token | device), its name, unix time (s): the token's expiry, or now,
--   unix time (s) before which others are forgotten
redis.call('SET', KEYS[2], ARGV[1])
if not ARGV[2] then return end
redis.call('INCR', KEYS[1])
if ARGV[2] == 'token' then
  redis.call('ZADD', KEYS[3], ARGV[4], ARGV[3])
  redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', ARGV[5])
  return
end
local devices = redis.call('HGETALL', KEYS[4])
for i = 1, #devices, 2 do
  if tonumber(devices[i + 1]) < tonumber(ARGV[5]) then redis.call('HDEL', KEYS[4], devices[i]) end
end
redis.call('HSET', KEYS[4], ARGV[3], ARGV[4])
