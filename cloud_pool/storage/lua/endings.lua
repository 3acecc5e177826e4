-- How jobs end, and how their leases are checked.

-- The receiver of a webhook: scheme, host and port of its URL.
local function receiver_of(url)
  local receiver = string.lower(string.match(url, '^%a+://[^/?#]*') or url)
  return (string.gsub(string.gsub(receiver, '^(https://.*):443$', '%1'), '^(http://.*):80$', '%1'))
end

-- Let the next claim look at a receiver of a tenant: it may have work, or a free slot.
local function wake_receiver(tenant, receiver, now)
  redis.call('ZADD', key('webhooks', tenant), 'LT', now, receiver)
  redis.call('ZADD', key('webhooks'), 'LT', now, tenant)
end

-- Add a delivery to the webhook outbox. The fence in its id makes it unique for each run of the job.
local function queue_webhook(id, record, now)
  local f = redis.call('HMGET', record, 'webhook', 'owner', 'fence', 'state', 'traceparent')
  if not f[1] or f[1] == '' or not f[2] then return end
  local delivery, tenant, receiver = id .. '.' .. (f[3] or '0'), tenant_of(f[2]), receiver_of(f[1])
  redis.call('HSET', key('webhook', delivery), 'job', id, 'owner', f[2], 'url', f[1], 'state', f[4], 'finished', now,
    'attempts', 0, 'fence', 0, 'traceparent', f[5] or '')
  redis.call('HSET', record, 'webhook_status', 'pending')
  redis.call('ZADD', key('webhooks', tenant, receiver), now, delivery)
  redis.call('INCR', key('webhooks_pending'))
  redis.call('ZADD', key('webhook_receivers'), 'NX', 0, tenant .. ' ' .. receiver)
  wake_receiver(tenant, receiver, now)
end

-- Count a job among its tenant's unfinished ones, with the bytes of its request.
local function count_open(tenant, id, record, now)
  redis.call('ZADD', key('open', tenant), now, id)
  redis.call('HINCRBY', key('open_bytes'), tenant, redis.call('HGET', record, 'bytes') or 0)
end
local function count_closed(tenant, id, record)
  if redis.call('ZREM', key('open', tenant), id) == 0 then return end
  if redis.call('EXISTS', key('open', tenant)) == 0 then redis.call('HDEL', key('open_bytes'), tenant) return end
  redis.call('HINCRBY', key('open_bytes'), tenant, -(redis.call('HGET', record, 'bytes') or 0))
end

-- Let a job's record, its events and its idempotency key live for `ttl` (ms), or for the time that it has of its own,
-- which is returned.
local function keep_for(id, record, ttl)
  ttl = tonumber(redis.call('HGET', record, 'ttl') or ttl) or ttl
  local lock = redis.call('HGET', record, 'idempotency')
  redis.call('PEXPIRE', record, ttl)
  redis.call('PEXPIRE', key('events', id), ttl)
  if lock and lock ~= '' then redis.call('PEXPIRE', lock, ttl) end
  return ttl
end

-- Ended jobs are counted for their tenant until they expire, those that expire first at the front: `ended:<tenant>` has
-- `id bytes` by expiry, `ended_bytes:<tenant>` their sum. accept.lua keeps both within the tenant's bounds. Lines of a
-- batch are not counted: the batch deletes them.
local NEVER_RAN_TTL_MS = 600000  -- of a job that was cancelled or expired before a worker had it
local ENDED_BYTES = 2048  -- of a record and its events, beside request, answer and error
local MAX_REMOVED = 16

local function ended_member(id, record)
  local bytes = redis.call('HGET', record, 'kept')
  return bytes and id .. ' ' .. bytes
end
local function uncount_member(tenant, member)
  if redis.call('ZREM', key('ended', tenant), member) == 0 then return end
  if redis.call('EXISTS', key('ended', tenant)) == 0 then redis.call('DEL', key('ended_bytes', tenant)) return end
  redis.call('DECRBY', key('ended_bytes', tenant), string.match(member, '%d+$'))
end
local function uncount_ended(tenant, id, record)
  local member = ended_member(id, record)
  if member then uncount_member(tenant, member) end
end
local function count_ended(tenant, id, record, now, ttl)
  local bytes = ENDED_BYTES + redis.call('STRLEN', key('result', id)) + redis.call('HSTRLEN', record, 'body')
    + redis.call('HSTRLEN', record, 'error')
  redis.call('HSET', record, 'kept', bytes)
  if redis.call('ZADD', key('ended', tenant), after(now, ttl), id .. ' ' .. bytes) == 0 then return end
  redis.call('INCRBY', key('ended_bytes', tenant), bytes)
  for _, counted in ipairs({'ended', 'ended_bytes'}) do
    redis.call('PEXPIRE', key(counted, tenant), math.max(ttl, redis.call('PTTL', key(counted, tenant))))
  end
end

-- Drop the deliveries of a job that wait for their turn. One that is being sent ends by itself.
local function drop_deliveries(id, record)
  local f = redis.call('HMGET', record, 'webhook', 'owner', 'fence')
  if not f[1] or f[1] == '' or not f[2] then return end
  local tenant, receiver, last = tenant_of(f[2]), receiver_of(f[1]), tonumber(f[3]) or 0
  for fence = math.max(0, last - 1), last do
    local delivery = id .. '.' .. string.format('%.0f', fence)
    if redis.call('ZREM', key('webhooks', tenant, receiver), delivery) == 1 then
      redis.call('DEL', key('webhook', delivery))
      redis.call('DECR', key('webhooks_pending'))
    end
  end
end

-- Delete a job with all that is kept of it.
local function forget_job(id, record)
  local f = redis.call('HMGET', record, 'owner', 'idempotency', 'dead_letter')
  redis.call('ZREM', key('jobs', f[1] or ''), id)
  if f[3] and f[3] ~= '' then redis.call('XDEL', key('dead'), f[3]) end
  if f[2] and f[2] ~= '' then redis.call('UNLINK', f[2]) end
  redis.call('UNLINK', record, key('result', id), key('events', id), key('text', id), key('followed', id))
end

-- Forget ended jobs of a tenant that has more than its bounds, those that expire first, and count no expired ones.
local function trim_ended(tenant, now, max_ended, max_bytes)
  local ended = key('ended', tenant)
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', ended, '-inf', now, 'LIMIT', 0, 100)) do
    uncount_member(tenant, member)
  end
  for _, member in ipairs(redis.call('ZRANGE', ended, 0, MAX_REMOVED - 1)) do
    if redis.call('ZCARD', ended) < max_ended
      and tonumber(redis.call('GET', key('ended_bytes', tenant)) or 0) < max_bytes then return end
    local id = string.match(member, '^[^ ]+')
    uncount_member(tenant, member)
    drop_deliveries(id, key('job', id))
    forget_job(id, key('job', id))
  end
end

-- Finish a job that has reached a final state: remove it from queue, schedules and open jobs, set the time to live of
-- its record and events (ms), queue the webhook, and count it in its batch. The only place where a job ends.
local function finish_job(id, record, now, ttl)
  leave_queue(id, record)
  local f = redis.call('HMGET', record, 'owner', 'batch', 'state', 'error', 'attempts')
  local is_line = f[2] and f[2] ~= ''
  if not is_line and f[5] == '0' then ttl = math.min(tonumber(ttl), NEVER_RAN_TTL_MS) end
  redis.call('ZREM', key('waiting'), id)
  redis.call('ZREM', key('deadlines'), id)
  count_closed(tenant_of(f[1]), id, record)
  redis.call('HSET', record, 'finished', now)
  -- A dead letter may be retried.
  if f[3] ~= 'dead' then redis.call('HDEL', record, 'body') end
  publish_event(id, f[3], f[4])
  redis.call('UNLINK', key('text', id))  -- the result has it
  ttl = keep_for(id, record, ttl)
  queue_webhook(id, record, now)
  if not is_line then count_ended(tenant_of(f[1]), id, record, now, ttl) end
  if f[2] and redis.call('EXISTS', key('batch', f[2])) == 1 then
    local count = f[3] == 'succeeded' and 'completed' or 'failed'
    redis.call('HINCRBY', key('batch', f[2]), count, 1)
    redis.call('HINCRBY', key('batch', f[2]), 'ended', 1)
  end
end

-- Move a running job to the dead letters. At most about `max_dead` of them are kept; `ttl` in ms.
local function dead_letter(id, record, now, ttl, max_dead)
  if not transition(record, 'exhaust') then return false end
  local f = redis.call('HMGET', record, 'owner', 'tier', 'attempts', 'code')
  for i = 1, 4 do f[i] = f[i] or '' end
  finish_job(id, record, now, ttl)
  redis.call('HSET', record, 'dead_letter', redis.call('XADD', key('dead'), 'MAXLEN', '~', max_dead, '*',
    'id', id, 'owner', f[1], 'tier', f[2], 'attempts', tonumber(f[3]) or 0, 'code', f[4]))
  return true
end

-- Move a record that this version cannot read to the dead letters, whatever its state. An operator may retry it with
-- workers that can read it.
local function quarantine(id, record, now, ttl, max_dead)
  local code = 'record_unreadable'
  redis.call('HSET', record, 'state', 'running', 'code', code, 'error', cjson.encode({message =
    'a worker could not read the record: it is damaged or of another version', type = 'server_error', code = code}))
  dead_letter(id, record, now, ttl, max_dead)
end

-- Whether the run with this fence still owns the job.
local function holds_lease(record, fence)
  local f = redis.call('HMGET', record, 'state', 'fence')
  return f[1] == 'running' and f[2] == fence
end
