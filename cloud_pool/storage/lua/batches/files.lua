-- Shared by the scripts that change files. A tenant is charged for a file until its content is deleted.

-- Set the bytes that a file is charged with, in its tenant's quota and its store's total.
local function charge(id, tenant, store, bytes)
  local before = tonumber(redis.call('ZSCORE', key('file_bytes', tenant), id) or 0)
  redis.call('ZADD', key('file_bytes', tenant), bytes, id)
  redis.call('HINCRBY', key('content_bytes'), store, string.format('%.0f', tonumber(bytes) - before))
end

-- Return the number and the bytes of a tenant's files.
local function usage(tenant)
  local rows, bytes = redis.call('ZRANGE', key('file_bytes', tenant), 0, -1, 'WITHSCORES'), 0
  for i = 2, #rows, 2 do bytes = bytes + tonumber(rows[i]) end
  return #rows / 2, bytes
end

-- Make a written file visible to its owner, until it expires.
local function publish_file(id, now, ttl)
  local file, expires = key('file', id), after(now, ttl)
  redis.call('HSET', file, 'state', 'ready', 'expires', expires)
  redis.call('ZADD', key('file_due'), expires, id)
  redis.call('ZADD', key('files', redis.call('HGET', file, 'owner')), redis.call('HGET', file, 'created'), id)
end

-- Hide a file from its owner. Returns whether its content may be deleted now; the caller has until `lease` (ms) for it,
-- then another one gets it. The content stays while a batch reads it: the last one makes it due (batch_transition).
local function retire_file(id, now, lease)
  local file = key('file', id)
  local f = redis.call('HMGET', file, 'owner', 'users')
  redis.call('HSET', file, 'state', 'deleted')
  redis.call('ZREM', key('files', f[1]), id)
  if tonumber(f[2] or 0) > 0 then
    redis.call('ZREM', key('file_due'), id)
    return false
  end
  redis.call('ZADD', key('file_due'), after(now, lease), id)
  return true
end

-- Return the id of a batch's output or error file.
local function output_file(batch, part) return 'file-' .. string.gsub(batch, '^batch_', '') .. '-' .. part end
