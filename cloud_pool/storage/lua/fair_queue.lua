-- Queues of jobs, one for each tier and priority: tenants take turns by the tokens that their jobs may use, and each
-- tenant's own jobs come in the order of acceptance.
--
-- Start-time fair queueing, as admission/waiting.py does it for requests: the next tenant is the one with the lowest
-- tag, which grows by the cost of its job (tokens over the tenant's weight). Virtual time is the highest tag of a job
-- that was claimed. A tenant that was away enters CREDIT jobs before that, so it waits for no other tenant's backlog.
local PRIORITIES = {'interactive', 'standard', 'bulk'}
local CREDIT, MAX_COST = 16, 1e6
local TAGS_TTL_MS = 3600000
local TRIAL_MS = 5000
local MAX_WAKE_UPS = 64

local function queue(tier, priority) return key('queue', tier, priority) end
local function queue_of(tenant, tier, priority) return key('queue', tier, priority, tenant) end
local function leases(tier, priority) return key('leases', tier, priority) end

local function each_queue(visit)
  for _, tier in ipairs(redis.call('SMEMBERS', key('tiers'))) do
    for _, priority in ipairs(PRIORITIES) do visit(tier, priority) end
  end
end

-- Wake workers that wait for jobs of this tier: each takes one token.
local function wake_workers(tier, count)
  local wake = key('wake', tier)
  for _ = 1, math.min(count, MAX_WAKE_UPS - redis.call('LLEN', wake)) do redis.call('LPUSH', wake, '1') end
end

-- Let a tenant with queued jobs take turns.
local function take_turns(tenant, tier, priority)
  local turns = key('turns', tier, priority)
  if redis.call('ZSCORE', turns, tenant) then return end
  local first = redis.call('ZRANGE', queue_of(tenant, tier, priority), 0, 0)[1]
  if not first then return end
  local cost = tonumber(redis.call('HGET', key('job', first), 'cost') or 1)
  local virtual = tonumber(redis.call('HGET', queue(tier, priority), 'virtual') or 0)
  local tag = tonumber(redis.call('ZSCORE', key('tags', tier, priority), tenant) or -math.huge)
  redis.call('ZADD', turns, math.max(tag, virtual - CREDIT * cost), tenant)
end

-- Let a tenant take no more turns. Its tag is remembered while it may matter: a pause is no way out of a debt.
local function stop_turns(tenant, tier, priority)
  local turns, tags = key('turns', tier, priority), key('tags', tier, priority)
  local tag = redis.call('ZSCORE', turns, tenant)
  if not tag then return end
  local virtual = tonumber(redis.call('HGET', queue(tier, priority), 'virtual') or 0)
  redis.call('ZREM', turns, tenant)
  redis.call('ZADD', tags, tag, tenant)
  redis.call('ZREMRANGEBYSCORE', tags, '-inf', virtual - CREDIT * MAX_COST)
  redis.call('PEXPIRE', tags, TAGS_TTL_MS)
end

-- Stop a tenant's turns for some time, because it is over a rate or budget. Its jobs stay queued. After a long wait
-- it is on trial: for some seconds one of its jobs starts at a time, since its limit may still be reached.
local function block(tenant, now, wait_ms)
  redis.call('ZADD', key('blocked'), after(now, wait_ms), tenant)
  if tonumber(wait_ms) >= TRIAL_MS then redis.call('ZADD', key('trials'), after(now, wait_ms + TRIAL_MS), tenant) end
  each_queue(function(tier, priority) stop_turns(tenant, tier, priority) end)
end

local function unblock(tenant)
  local on_trial = redis.call('ZSCORE', key('trials'), tenant)
  each_queue(function(tier, priority)
    local count = redis.call('ZCARD', queue_of(tenant, tier, priority))
    if count > 0 then
      take_turns(tenant, tier, priority)
      wake_workers(tier, on_trial and 1 or count)
    end
  end)
end

-- Put a job into its queue, at its place by order of acceptance.
local function enqueue(id, record, now)
  local f = redis.call('HMGET', record, 'tier', 'priority', 'owner', 'number')
  local tier, priority, tenant = f[1], f[2], tenant_of(f[3])
  redis.call('HSET', record, 'queued', now)
  if redis.call('ZADD', queue_of(tenant, tier, priority), f[4], id) == 1 then
    redis.call('HINCRBY', queue(tier, priority), 'queued', 1)
  end
  local release = redis.call('ZSCORE', key('blocked'), tenant)
  if release and tonumber(release) > tonumber(now) then return end
  take_turns(tenant, tier, priority)
  wake_workers(tier, 1)
end

-- Take a job out of its queue, and end its lease.
local function leave_queue(id, record)
  local f = redis.call('HMGET', record, 'tier', 'priority', 'owner')
  local tier, priority, tenant = f[1], f[2], tenant_of(f[3])
  if not (tier and priority) then return end
  redis.call('ZREM', leases(tier, priority), id)
  if redis.call('ZREM', queue_of(tenant, tier, priority), id) == 0 then return end
  redis.call('HINCRBY', queue(tier, priority), 'queued', -1)
  if redis.call('EXISTS', queue_of(tenant, tier, priority)) == 0 then stop_turns(tenant, tier, priority) end
end

-- When a lease that begins or is renewed now ends, by Redis's own clock always: tests move the clock of jobs.
local function lease_end(lease_ms) return after(time_ms(-1), lease_ms) end
