"""What Redis runs, whole and alone. KEYS[1] is `<prefix>:{<key>}`: all keys of one answer share a slot.

    …:entry          hash     at (ms), value: the answer
    …:lease:<rank>   hash     fence, open (1 while held), until (ms), home (the leader's gateway), wanted (ms, until
                              which somebody on another gateway waits). No fence comes again
    …:flow:<rank>:<fence>     stream   kind and data: `said` some pieces, `end` the last ones, `failed`, or `look`, for
                              an answer that ended before its leader heard that somebody waits

A rank is a priority: the urgent never wait for a leader that queues behind them. Times are Redis's own, in ms, so that
gateways whose clocks differ share one; tests pass a time instead (ARGV[1] ≥ 0). Every key has a time to live.
"""

from __future__ import annotations

from typing import Final

_PRELUDE = """
local P, rank = KEYS[1], ARGV[2]
local now = tonumber(ARGV[1])
if now < 0 then local t = redis.call('TIME'); now = tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000) end
local entry, lease = P .. ':entry', P .. ':lease:' .. rank
local KEPT = 60000  -- longer than any lease: Redis cleans up, expiry is by `until`
local function whole(number) return string.format('%.0f', number) end
local function flow(fence) return P .. ':flow:' .. rank .. ':' .. fence end

local function read(name, ...)  -- nil where the key is something else than we made it
  local found = redis.pcall('HMGET', name, ...)
  if found.err then redis.call('DEL', name) return {} end
  return found
end

local function holds(fence)
  local f = read(lease, 'fence', 'open')
  return f[1] == fence and f[2] == '1'
end

local function wanted() return (tonumber(read(lease, 'wanted')[1]) or 0) > now end

local function renew(fence, ms)
  redis.call('HSET', lease, 'until', whole(now + ms))
  redis.call('PEXPIRE', lease, KEPT)
  redis.call('PEXPIRE', flow(fence), KEPT)  -- what was said is there for as long as more may be
end

local function say(fence, kind, data)
  redis.call('XADD', flow(fence), '*', 'kind', kind, 'data', data)
  redis.call('PEXPIRE', flow(fence), KEPT)
end

local function close() redis.call('HSET', lease, 'open', '0') end
"""

_ENTER = """
local lease_ms, ttl, home, waits, chance = tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5], tonumber(ARGV[6]), ARGV[7]
local found = read(entry, 'at', 'value')
local age = tonumber(found[1]) and now - tonumber(found[1]) or -1
if found[2] and age >= 0 and age < ttl then return {'hit', found[2], whole(age)} end  -- from the future: no age
local f = read(lease, 'fence', 'open', 'until', 'home')
-- What is ours and not in the making here is a lease whose grant we never heard of: nobody will ever say anything.
if f[2] == '1' and (tonumber(f[3]) or 0) > now and f[4] and f[4] ~= home then
  if waits == 0 then return {'held', '', ''} end
  redis.call('HSET', lease, 'wanted', whole(now + waits))
  redis.call('PUBLISH', f[4], P .. ' ' .. rank)
  return {'follow', f[1], ''}
end
-- Where Redis forgot the last one, time has passed; should its clock have gone back as well, chance tells them apart.
local last = tonumber(string.match(f[1] or '', '^%d+')) or 0
local fence = whole(math.max(last + 1, now)) .. '-' .. chance
redis.call('HSET', lease, 'fence', fence, 'open', '1', 'home', home, 'wanted', '0')
renew(fence, lease_ms)
return {'lead', fence, f[2] == '1' and 'over' or ''}
"""

_RENEW = """
if not holds(ARGV[3]) then return -1 end
renew(ARGV[3], tonumber(ARGV[4]))
return wanted() and 1 or 0
"""

_PUBLISH = """
if not holds(ARGV[3]) then return -1 end
renew(ARGV[3], tonumber(ARGV[4]))
say(ARGV[3], 'said', ARGV[5])
return wanted() and 1 or 0
"""

_KEEP = """
-- ARGV fence, value, ms to keep it, pieces that were not said yet ('' where the leader knows of nobody who waits)
if not holds(ARGV[3]) then return 0 end
if ARGV[4] ~= '' then
  redis.call('DEL', entry)
  redis.call('HSET', entry, 'at', whole(now), 'value', ARGV[4])
  redis.call('PEXPIRE', entry, ARGV[5])
end
if wanted() then say(ARGV[3], ARGV[6] ~= '' and 'end' or 'look', ARGV[6]) end
close()
return 1
"""

_CLOSE = """
if not holds(ARGV[3]) then return 0 end
if wanted() then say(ARGV[3], 'failed', '') end
close()
return 1
"""

_LEAVE = """
if not holds(ARGV[3]) then return 0 end
if wanted() then return 1 end
close()
return 0
"""

_WATCH = """
local f = read(lease, 'fence', 'open', 'until')
if f[1] ~= ARGV[3] then return 0 end
if f[2] ~= '1' then return 0 end
if (tonumber(f[3]) or 0) <= now then return 0 end
redis.call('HSET', lease, 'wanted', whole(now + tonumber(ARGV[4])))
return 1
"""

_STALE = """
local found = read(entry, 'at', 'value')
local age = tonumber(found[1]) and now - tonumber(found[1]) or -1
if found[2] and age >= 0 and age < tonumber(ARGV[3]) then return {found[2], whole(age)} end
return {}
"""

_DROP = """
if read(entry, 'value')[1] == ARGV[3] then return redis.call('DEL', entry) end
return 0
"""

SCRIPTS: Final = {
    "enter": _PRELUDE + _ENTER,  # lease ms, ttl ms, home, ms that a follower waits (0: it does not), chance
    "renew": _PRELUDE + _RENEW,  # fence, lease ms → -1 lost, 1 somebody waits, 0 nobody
    "publish": _PRELUDE + _PUBLISH,  # fence, lease ms, pieces → as renew
    "keep": _PRELUDE + _KEEP,  # fence, value, ms, pieces → 0: lost
    "close": _PRELUDE + _CLOSE,  # fence
    "leave": _PRELUDE + _LEAVE,  # fence → 1: somebody waits, so stay
    "watch": _PRELUDE + _WATCH,  # fence, ms → 0: this leader will say nothing more
    "stale": _PRELUDE + _STALE,  # the greatest age, ms
    "drop": _PRELUDE + _DROP,  # the value that was no answer
}
"""Each begins with ARGV now (ms, negative: Redis's clock) and rank."""
