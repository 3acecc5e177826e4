#!lua
-- Store a file: its pieces in a list and its record. The caller may repeat the call.
-- ARGV: now (unix ms), id, owner, max files of the owner (0: unlimited), ttl (ms), number of pieces, the pieces,
--   then field, value, ... of the record
-- Reply: 1; 0 if the owner has too many files
local now, id, owner, max_files, ttl = time_ms(ARGV[1]), ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5]
local file, parts = key('file', id), key('file', id, 'parts')
if redis.call('EXISTS', file) == 1 then return 1 end
local pieces = tonumber(ARGV[6])
if max_files > 0 then
  for _, old in ipairs(redis.call('ZRANGE', key('files', owner), 0, -1)) do
    if redis.call('EXISTS', key('file', old)) == 0 then redis.call('ZREM', key('files', owner), old) end
  end
  if redis.call('ZCARD', key('files', owner)) >= max_files then return 0 end
end
for i = 7, 6 + pieces do redis.call('RPUSH', parts, ARGV[i]) end
if pieces > 0 then redis.call('PEXPIRE', parts, ttl) end
redis.call('HSET', file, 'id', id, 'owner', owner, 'created', now, 'expires', tonumber(now) + tonumber(ttl))
for i = 7 + pieces, #ARGV, 2 do redis.call('HSET', file, ARGV[i], ARGV[i + 1]) end
redis.call('PEXPIRE', file, ttl)
redis.call('ZREMRANGEBYSCORE', key('files', owner), '-inf', tonumber(now) - tonumber(ttl))
redis.call('ZADD', key('files', owner), now, id)
return 1
