-- Reservations of a tenant's budget: what requests in progress may cost. Shared by take, restore and add.
-- reserved: hash of reservation -> "<1e-12 USD> <fence>", and their sum as `sum`
-- ends:     zset of reservations by when they end (unix s): a killed process gives its reservations back then

-- Give a reservation back, if it is still that of this fence: another run of a job has the job's reservation again.
local function release(reserved, ends, id, fence)
  local amount, holder = string.match(redis.call('HGET', reserved, id) or '', '^(%d+) (%d+)$')
  if not amount or (fence and fence ~= holder) then return end
  redis.call('HDEL', reserved, id)
  redis.call('ZREM', ends, id)
  if redis.call('EXISTS', ends) == 0 then redis.call('DEL', reserved)
  else redis.call('HINCRBY', reserved, 'sum', -tonumber(amount)) end
end

-- Reserve an amount (1e-12 USD) for a number of seconds. A job's reservation replaces that of its run before.
local function reserve(reserved, ends, now, id, fence, amount, lifetime)
  release(reserved, ends, id)
  redis.call('HSET', reserved, id, string.format('%.0f %s', amount, fence))
  redis.call('HINCRBY', reserved, 'sum', string.format('%.0f', amount))
  redis.call('ZADD', ends, now + lifetime, id)
  local ttl = math.ceil(lifetime * 1000) + 60000
  for _, key in ipairs({reserved, ends}) do
    if redis.call('PTTL', key) < ttl then redis.call('PEXPIRE', key, ttl) end
  end
end

-- What other requests have reserved, 1e-12 USD. Reservations that have ended are given back.
local function reserved_by_others(reserved, ends, now, id)
  for _, ended in ipairs(redis.call('ZRANGEBYSCORE', ends, '-inf', now, 'LIMIT', 0, 1000)) do
    release(reserved, ends, ended)
  end
  local own = string.match(redis.call('HGET', reserved, id) or '', '^%d+') or '0'
  return tonumber(redis.call('HGET', reserved, 'sum') or '0') - tonumber(own)
end
