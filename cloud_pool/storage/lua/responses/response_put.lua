#!lua
-- Store a turn or a conversation, in the place of one of the same name. The tenant's places that expire first give way.
-- ARGV: time, owner, place, name, content, digest of the user or '', ttl ms, most places, most bytes, 1 to store only
-- what is known
-- Reply: 'ok', also if it is not known any more; 'absent' if the place is another owner's; 'too_large' if the place alone exceeds the bounds
local now, owner, place, name, content = time_ms(ARGV[1]), ARGV[2], ARGV[3], 't:' .. ARGV[4], ARGV[5]
local ttl, most, most_bytes = tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])
local tenant = tenant_of(owner)
local record, listed, sizes = key('response', place), key('responses', tenant), key('response_bytes', tenant)
local known = redis.call('HGET', record, 'owner')
if known and known ~= owner then return 'absent' end
local old = redis.call('HGET', record, name)
if ARGV[10] == '1' and not old then return 'ok' end
local bytes = tonumber(redis.call('HGET', record, 'bytes') or '0') + #content - (old and #old - 8 or 0)
if bytes > most_bytes or redis.call('HLEN', record) > most * 2 then return 'too_large' end
local order = old and string.sub(old, 1, 8) or string.format('%08d', redis.call('HINCRBY', record, 'turns', 1))
redis.call('HSET', record, 'owner', owner, 'bytes', bytes, name, order .. content)
if ARGV[6] ~= '' then redis.call('HSET', record, 'u:' .. ARGV[6], 1) end
redis.call('HINCRBY', sizes, '', bytes - tonumber(redis.call('HGET', sizes, place) or '0'))
redis.call('HSET', sizes, place, bytes)
redis.call('ZADD', listed, after(now, ttl), place)
for _, each in ipairs({record, listed, sizes}) do redis.call('PEXPIRE', each, ttl) end
for _, expired in ipairs(redis.call('ZRANGEBYSCORE', listed, '-inf', now, 'LIMIT', 0, 100)) do
  forget_response(tenant, expired)
end
while redis.call('ZCARD', listed) > most or tonumber(redis.call('HGET', sizes, '')) > most_bytes do
  local first = redis.call('ZRANGE', listed, 0, 1)
  local oldest = first[1] ~= place and first[1] or first[2]
  if not oldest then break end
  forget_response(tenant, oldest)
end
return 'ok'
