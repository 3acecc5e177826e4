-- Announce or renew a follower's interest.
-- ARGV[3..]: fence, how long the interest lasts (ms)
-- Reply: 1; 0 if this leader will write nothing more
local f = read(lease, 'fence', 'open', 'until')
if f[1] ~= ARGV[3] then return 0 end
if f[2] ~= '1' then return 0 end
if (tonumber(f[3]) or 0) <= now then return 0 end
redis.call('HSET', lease, 'wanted', integer(now + tonumber(ARGV[4])))
return 1
