-- Keep states of a tenant's sessions. KEYS: the list of its keys. ARGV: ttl ms, most keys, then a key and its state each.
local time = redis.call('TIME')
local now, listed = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000), KEYS[1]
for at = 3, #ARGV, 2 do
  redis.call('SET', listed .. ':' .. ARGV[at], ARGV[at + 1], 'PX', ARGV[1])
  redis.call('ZADD', listed, now, ARGV[at])
end
redis.call('PEXPIRE', listed, ARGV[1])
redis.call('ZREMRANGEBYSCORE', listed, '-inf', string.format('%.0f', now - tonumber(ARGV[1])))
local over = redis.call('ZCARD', listed) - tonumber(ARGV[2])
if over > 0 then
  local gone = redis.call('ZRANGE', listed, 0, over - 1)
  redis.call('ZREM', listed, unpack(gone))
  for _, key in ipairs(gone) do redis.call('DEL', listed .. ':' .. key) end
end
return 'ok'
