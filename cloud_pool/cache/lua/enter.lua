-- Read the answer, or become its leader or follower.
-- ARGV[3..]: lease (ms), ttl (ms), home (this gateway's channel), how long a follower's interest lasts (ms; 0: this
--   gateway does not follow), random part of the fence
-- Reply: {hit, value, age in ms} | {held, '', ''} (another gateway leads and this one does not follow)
--   | {follow, fence, ''} | {lead, fence, 'over' if it took over from a leader whose lease ran out, else ''}
local lease_ms, ttl, home = tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]
local interest_ms, chance = tonumber(ARGV[6]), ARGV[7]
local found = read(entry, 'at', 'value')
local age = tonumber(found[1]) and now - tonumber(found[1]) or -1  -- negative: written in the future
if found[2] and age >= 0 and age < ttl then return {'hit', found[2], integer(age)} end
local f = read(lease, 'fence', 'open', 'until', 'home')
-- A lease of this gateway that this gateway does not know of was granted in a reply that got lost: take it over, since
-- no leader would ever write to its stream.
if f[2] == '1' and (tonumber(f[3]) or 0) > now and f[4] and f[4] ~= home then
  if interest_ms == 0 then return {'held', '', ''} end
  redis.call('HSET', lease, 'wanted', integer(now + interest_ms))
  redis.call('PUBLISH', f[4], P .. ' ' .. rank)
  return {'follow', f[1], ''}
end
-- Fences rise with time, so that they do not repeat after Redis has lost the lease; the random part tells them apart
-- even if the clock went back.
local last = tonumber(string.match(f[1] or '', '^%d+')) or 0
local fence = integer(math.max(last + 1, now)) .. '-' .. chance
redis.call('HSET', lease, 'fence', fence, 'open', '1', 'home', home, 'wanted', '0')
renew(fence, lease_ms)
return {'lead', fence, f[2] == '1' and 'over' or ''}
