-- Record one peer's state and read those of all live peers of a tier. The clock is Redis's.
-- KEYS: hash of peer -> "<time of the heartbeat, unix s> <its state>"
-- ARGV: peer, its state, how long a peer lives after its last heartbeat (s)
-- Reply: {whole seconds of the time, peer, state, ...}
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
redis.call('HSET', KEYS[1], ARGV[1], string.format('%.3f ', now) .. ARGV[2])
redis.call('EXPIRE', KEYS[1], 60)
local alive = {tonumber(time[1])}
local all = redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  local seen, state = string.match(all[i + 1], '(%S+) (.+)')
  if now - tonumber(seen) > tonumber(ARGV[3]) then
    redis.call('HDEL', KEYS[1], all[i])
  else
    alive[#alive + 1] = all[i]
    alive[#alive + 1] = state
  end
end
return alive
