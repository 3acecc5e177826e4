-- Shared by all cache scripts.
-- KEYS[1]: `<prefix>:{<key>}`. ARGV[1..2]: now (ms; negative: Redis's clock), rank.
-- No `#!lua` line may precede this text: with one, Redis checks its memory before the script instead of at each write.
local P, rank = KEYS[1], ARGV[2]
local now = tonumber(ARGV[1])
if now < 0 then local t = redis.call('TIME'); now = tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000) end
local entry, lease = P .. ':entry', P .. ':lease:' .. rank
local KEEP_MS = 60000  -- ms, longer than any lease: only cleanup; a lease expires by its field `until`
local function integer(number) return string.format('%.0f', number) end
local function stream_key(fence) return P .. ':flow:' .. rank .. ':' .. fence end

-- HMGET, or an empty table for a key of another type, which is deleted.
local function read(name, ...)
  local found = redis.pcall('HMGET', name, ...)
  if found.err then redis.call('DEL', name) return {} end
  return found
end

-- Whether the lease with this fence is in force.
local function holds(fence)
  local f = read(lease, 'fence', 'open')
  return f[1] == fence and f[2] == '1'
end

-- Whether a follower on another gateway waits for the answer.
local function wanted() return (tonumber(read(lease, 'wanted')[1]) or 0) > now end

local function renew(fence, ms)
  redis.call('HSET', lease, 'until', integer(now + ms))
  redis.call('PEXPIRE', lease, KEEP_MS)
  redis.call('PEXPIRE', stream_key(fence), KEEP_MS)  -- followers may still read the whole stream
end

local function append(fence, kind, data)
  redis.call('XADD', stream_key(fence), '*', 'kind', kind, 'data', data)
  redis.call('PEXPIRE', stream_key(fence), KEEP_MS)
end

local function close() redis.call('HSET', lease, 'open', '0') end
