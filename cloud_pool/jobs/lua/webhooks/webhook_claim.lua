#!lua flags=allow-oom
-- Claim due deliveries. A delivery to a disabled URL is finished here.
-- ARGV: now (unix ms), lease (ms), limit
-- Reply: deliveries as HGETALL, each with its id; `fence` was incremented
local now, lease, limit, rows = tonumber(time_ms(ARGV[1])), tonumber(ARGV[2]), ARGV[3], {}
for _, delivery in ipairs(redis.call('ZRANGEBYSCORE', key('webhooks'), '-inf', now, 'LIMIT', 0, limit)) do
  local f = redis.call('HMGET', key('webhook', delivery), 'owner', 'url')
  if not f[1] then
    redis.call('ZREM', key('webhooks'), delivery)
  elseif redis.call('EXISTS', disabled_key(f[1], f[2])) == 1 then
    finish(delivery, 'disabled')
  else
    redis.call('HINCRBY', key('webhook', delivery), 'fence', 1)
    redis.call('ZADD', key('webhooks'), now + lease, delivery)
    local row = redis.call('HGETALL', key('webhook', delivery))
    table.insert(row, 'id')
    table.insert(row, delivery)
    table.insert(row, 'claimed')
    table.insert(row, string.format('%.0f', now))
    table.insert(rows, row)
  end
end
return rows
