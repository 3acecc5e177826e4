#!lua flags=allow-oom
-- Take or renew the lease of a pipeline's topic; a ttl of 0 gives it back.
-- ARGV: name, owner, ttl (ms)
-- Reply: 1; 0 if another process holds it
local name, owner, ttl = ARGV[1], ARGV[2], tonumber(ARGV[3])
local holder = redis.call('GET', key('stream', name))
if holder and holder ~= owner then return 0 end
if ttl > 0 then redis.call('SET', key('stream', name), owner, 'PX', ttl)
elseif holder then redis.call('DEL', key('stream', name)) end
return 1
