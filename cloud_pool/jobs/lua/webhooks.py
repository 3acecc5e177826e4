"""Deliveries of webhooks in Redis: due times, leases and fences as for jobs, and owners' secrets.

hook:<id>              hash     job, owner, url, state, finished; `tried` deliveries, `fence` of the latest
hooks                  zset     by due time, unix ms; while one is being made, by the end of its lease
gone:<owner>:<sha1>    string   this owner's address said 410
secret:<owner>         hash     current; previous, until: the one before still signs until then
"""

from __future__ import annotations

from typing import Final

from .common import COMMON

_ENDING = """
local function finish(hook, outcome)
  local f = redis.call('HMGET', key('hook', hook), 'job')
  redis.call('ZREM', key('hooks'), hook)
  redis.call('DEL', key('hook', hook))
  if f[1] and redis.call('EXISTS', key('job', f[1])) == 1 then
    redis.call('HSET', key('job', f[1]), 'webhook_status', outcome)
  end
end
local function gone(owner, url) return key('gone', owner, redis.sha1hex(url)) end
"""

_CLAIM = """
local now, lease, limit, found = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3], {}
for _, hook in ipairs(redis.call('ZRANGEBYSCORE', key('hooks'), '-inf', now, 'LIMIT', 0, limit)) do
  local f = redis.call('HMGET', key('hook', hook), 'owner', 'url')
  if not f[1] then
    redis.call('ZREM', key('hooks'), hook)
  elseif redis.call('EXISTS', gone(f[1], f[2])) == 1 then
    finish(hook, 'disabled')
  else
    redis.call('HINCRBY', key('hook', hook), 'fence', 1)
    redis.call('ZADD', key('hooks'), now + lease, hook)
    local row = redis.call('HGETALL', key('hook', hook))
    table.insert(row, 'id')
    table.insert(row, hook)
    table.insert(found, row)
  end
end
return found
"""

_END = """
local hook, fence, outcome, due, gone_ttl = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local f = redis.call('HMGET', key('hook', hook), 'fence', 'owner', 'url')
if f[1] ~= fence then return 0 end
if outcome == 'again' then
  redis.call('HINCRBY', key('hook', hook), 'tried', 1)
  redis.call('ZADD', key('hooks'), due, hook)
  return 1
end
if outcome == 'disabled' then redis.call('SET', gone(f[2], f[3]), '1', 'PX', gone_ttl) end
finish(hook, outcome)
return 1
"""

_SECRET = """
local secret, now, candidate, rotate, overlap = key('secret', ARGV[1]), tonumber(ARGV[2]), ARGV[3], ARGV[4], ARGV[5]
local current = redis.call('HGET', secret, 'current')
if not current then
  redis.call('HSET', secret, 'current', candidate)
elseif rotate == '1' and current ~= candidate then
  redis.call('HSET', secret, 'current', candidate, 'previous', current, 'until', now + tonumber(overlap))
end
local f = redis.call('HMGET', secret, 'current', 'previous', 'until')
if f[3] and tonumber(f[3]) > now then return {f[1], f[2]} end
return {f[1]}
"""

_GONE = """
return redis.call('EXISTS', gone(ARGV[1], ARGV[2]))
"""

WEBHOOK_SCRIPTS: Final = {
    "hook_claim": COMMON + _ENDING + _CLAIM,
    "hook_end": COMMON + _ENDING + _END,
    "hook_secret": COMMON + _SECRET,
    "hook_gone": COMMON + _ENDING + _GONE,
}
