#!lua flags=allow-oom
-- Read an owner's signing secrets. The first call stores the candidate; a rotation replaces the current secret, which
-- stays valid as the previous one for the overlap. A repeated rotation with the same candidate changes nothing. Secrets
-- that nothing was signed with, and no caller has read, for 400 days are forgotten.
-- ARGV: owner, now (unix ms), candidate, 1 to rotate, overlap (ms)
-- Reply: {current [, previous]}
local TTL_MS = 400 * 86400000
local secret, now = key('webhook_secret', ARGV[1]), tonumber(time_ms(ARGV[2]))
local candidate, rotate, overlap = ARGV[3], ARGV[4], ARGV[5]
local current = redis.call('HGET', secret, 'current')
if not current then
  redis.call('HSET', secret, 'current', candidate)
elseif rotate == '1' and current ~= candidate then
  redis.call('HSET', secret, 'current', candidate, 'previous', current, 'until', now + tonumber(overlap))
end
redis.call('PEXPIRE', secret, TTL_MS)
local f = redis.call('HMGET', secret, 'current', 'previous', 'until')
if f[3] and tonumber(f[3]) > now then return {f[1], f[2]} end
return {f[1]}
