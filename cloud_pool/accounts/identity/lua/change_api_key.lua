-- Replace an API key, if nobody has changed it meanwhile.
-- KEYS: keys, nonce, last uses
-- ARGV: id, the key before ('': it is new), the key after ('': delete it), new nonce
-- Reply: 1; 0 if it is another one
if (redis.call('HGET', KEYS[1], ARGV[1]) or '') ~= ARGV[2] then return 0 end
if ARGV[3] == '' then
  redis.call('HDEL', KEYS[1], ARGV[1])
  redis.call('HDEL', KEYS[3], ARGV[1])
else
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
end
redis.call('SET', KEYS[2], ARGV[4])
return 1
