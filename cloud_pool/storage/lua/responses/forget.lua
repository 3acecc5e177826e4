-- Shared by the scripts of stored responses. A place is a response of its own, or a conversation with its turns.
local function forget_response(tenant, place)
  local sizes = key('response_bytes', tenant)
  redis.call('HINCRBY', sizes, '', -tonumber(redis.call('HGET', sizes, place) or '0'))
  redis.call('HDEL', sizes, place)
  redis.call('ZREM', key('responses', tenant), place)
  return redis.call('DEL', key('response', place))
end
