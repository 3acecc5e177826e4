-- Shared by all job scripts. KEYS[1] is the prefix of all keys; the table of keys is in __init__.py.
-- LAYOUT, from ../../redis/layout.py, and TRANSITIONS[state][event], the next state or nil, from states.py precede this
-- text.
local P = KEYS[1]
local function key(...) return P .. ':' .. table.concat({...}, ':') end

-- A process of another layout, old or new, changes nothing.
local layout = redis.call('GET', key('layout'))
if layout and layout ~= LAYOUT then return redis.error_reply('LAYOUT ' .. layout) end

-- The time, unix ms, as a string. A negative argument stands for Redis's own clock, which all processes share: one with
-- a wrong clock harms no job. Tests pass a time of theirs.
local function time_ms(argument)
  if tonumber(argument) >= 0 then return argument end
  local time = redis.call('TIME')
  return string.format('%.0f', tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000))
end
local function after(now, ms) return string.format('%.0f', tonumber(now) + tonumber(ms)) end

local function queue(tier, priority) return key('queue', tier, priority) end

-- Apply an event to a record. Returns the next state, or nil for an illegal transition, which changes nothing.
local function transition(record, event)
  local state = redis.call('HGET', record, 'state')
  if not state then return nil end
  local row = TRANSITIONS[state]  -- none for a state of another version
  local to = row and row[event]
  if to then redis.call('HSET', record, 'state', to) end
  return to
end

-- Append an event to the job's stream, which GET /v1/jobs/{id}/events serves.
local function publish_event(id, event, data)
  redis.call('XADD', key('events', id), 'MAXLEN', '~', 100, '*', 'event', event, 'data', data or '')
end

-- Append an event in place of the last ones if these are `names`, newest first: repetitions do not grow the stream.
local function publish_instead_of(names, id, event, data)
  local last = redis.call('XREVRANGE', key('events', id), '+', '-', 'COUNT', #names)
  local repeated = #last == #names
  for i, entry in ipairs(last) do repeated = repeated and entry[2][2] == names[i] end
  if repeated then for _, entry in ipairs(last) do redis.call('XDEL', key('events', id), entry[1]) end end
  publish_event(id, event, data)
end

local function tenant_of(owner) return string.match(owner or '', '^[^/]*') end

-- Remove the job's queue entry and acknowledge it.
local function leave_queue(record)
  local f = redis.call('HMGET', record, 'tier', 'priority', 'entry')
  if f[1] and f[2] and f[3] and f[3] ~= '' then
    redis.call('XACK', queue(f[1], f[2]), 'workers', f[3])
    redis.call('XDEL', queue(f[1], f[2]), f[3])
  end
  redis.call('HSET', record, 'entry', '')
end

-- Append the job to its queue, whose consumer group is created on first use.
local function enqueue(id, record)
  local f = redis.call('HMGET', record, 'tier', 'priority')
  local q = queue(f[1], f[2])
  if redis.call('EXISTS', q) == 0 then redis.call('XGROUP', 'CREATE', q, 'workers', '0', 'MKSTREAM') end
  redis.call('HSET', record, 'entry', redis.call('XADD', q, '*', 'id', id))
end

-- Park a waiting job until its tenant's limit resets, `release` (unix ms). `parked` holds tenants by their next release.
local function park(id, record, release)
  local f = redis.call('HMGET', record, 'owner', 'created')
  leave_queue(record)
  redis.call('ZADD', key('parked', tenant_of(f[1])), f[2], id)
  redis.call('ZADD', key('parked'), release, tenant_of(f[1]))
end

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

-- Finish a job that has reached a final state: remove it from queue, schedules and open jobs, set the time to live of
-- its record and events (ms), queue the webhook, and count it in its batch. The only place where a job ends.
local function finish_job(id, record, now, ttl)
  leave_queue(record)
  ttl = tonumber(redis.call('HGET', record, 'ttl') or ttl) or ttl
  local f = redis.call('HMGET', record, 'owner', 'batch', 'idempotency', 'state', 'error')
  redis.call('ZREM', key('waiting'), id)
  redis.call('ZREM', key('parked', tenant_of(f[1] or '')), id)
  redis.call('ZREM', key('deadlines'), id)
  redis.call('ZREM', key('open', f[1] or ''), id)
  redis.call('HSET', record, 'finished', now)
  if f[4] ~= 'dead' then redis.call('HDEL', record, 'body') end  -- a dead letter may be retried
  publish_event(id, f[4], f[5])
  redis.call('PEXPIRE', record, ttl)
  redis.call('PEXPIRE', key('events', id), ttl)
  if f[3] and f[3] ~= '' then redis.call('PEXPIRE', f[3], ttl) end
  queue_webhook(id, record, now)
  if f[2] and redis.call('EXISTS', key('batch', f[2])) == 1 then
    local count = f[4] == 'succeeded' and 'completed' or 'failed'
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
