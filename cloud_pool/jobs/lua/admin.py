"""What operators and housekeeping ask of Redis: dead letters, depths, and names of workers that are gone."""

from __future__ import annotations

from typing import Final

from .common import COMMON

_RETIRE = """
local gone = 0
for _, tier in ipairs(redis.call('SMEMBERS', key('tiers'))) do
  for _, priority in ipairs({'interactive', 'standard', 'bulk'}) do
    local q = queue(tier, priority)
    if redis.call('EXISTS', q) == 1 then
      for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', q, 'workers')) do
        local f = {}
        for at = 1, #consumer, 2 do f[consumer[at]] = consumer[at + 1] end
        if f['pending'] == 0 and f['idle'] > tonumber(ARGV[1]) then
          redis.call('XGROUP', 'DELCONSUMER', q, 'workers', f['name'])
          gone = gone + 1
        end
      end
    end
  end
end
return gone
"""

_REVIVE = """
local now, id, deadline = ARGV[1], ARGV[2], ARGV[3]
local record = key('job', id)
local f = redis.call('HMGET', record, 'owner', 'letter', 'batch', 'idem')
if f[3] and f[3] ~= '' then return 0 end  -- its batch has counted it
if not move(record, 'revive') then return 0 end
redis.call('PERSIST', record)
redis.call('PERSIST', key('events', id))
if f[4] and f[4] ~= '' then redis.call('PERSIST', f[4]) end
redis.call('XDEL', key('dead'), f[2])
redis.call('HSET', record, 'attempts', 0, 'deadline', deadline, 'letter', '')
redis.call('HDEL', record, 'finished', 'error', 'code')
redis.call('ZADD', key('open', f[1]), now, id)
redis.call('ZADD', key('deadlines'), deadline, id)
enqueue(id, record)
tell(id, 'queued')
return 1
"""

_PURGE = """
local id = ARGV[1]
local f = redis.call('HMGET', key('job', id), 'state', 'letter', 'owner', 'idem')
if f[1] ~= 'dead' then return 0 end
redis.call('XDEL', key('dead'), f[2])
redis.call('ZREM', key('jobs', f[3]), id)
redis.call('DEL', key('job', id), key('events', id), key('result', id))
if f[4] and f[4] ~= '' then redis.call('DEL', f[4]) end
return 1
"""

_DEPTHS = """
local found = {}
for _, tier in ipairs(redis.call('SMEMBERS', key('tiers'))) do
  for _, priority in ipairs({'interactive', 'standard', 'bulk'}) do
    local q = queue(tier, priority)
    if redis.call('EXISTS', q) == 1 then
      local group, info = redis.call('XINFO', 'GROUPS', q)[1], {}
      for at = 1, #group, 2 do info[group[at]] = group[at + 1] end
      local first = redis.call('XRANGE', q, '(' .. info['last-delivered-id'], '+', 'COUNT', 1)
      local since = first[1] and string.match(first[1][1], '^%d+') or '0'
      table.insert(found, {tier, priority, redis.call('XLEN', q) - info['pending'], info['pending'], since})
    end
  end
end
return {found, redis.call('XLEN', key('dead')), redis.call('ZCARD', key('waiting')), redis.call('ZCARD', key('hooks'))}
"""

ADMIN_SCRIPTS: Final = {
    "retire": COMMON + _RETIRE,
    "revive": COMMON + _REVIVE,
    "purge": COMMON + _PURGE,
    "depths": COMMON + _DEPTHS,
}
