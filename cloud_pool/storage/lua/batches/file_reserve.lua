#!lua
-- Begin a file, or let one that is being written grow, within the quotas. The caller may repeat the call.
-- ARGV: now (unix ms), id, owner, store, bytes, 1 to begin, time until a writer counts as dead (ms), max files and
--   bytes of the tenant, max bytes of the store (0: unlimited)
-- Reply: {ok | gone (the writer was taken for dead) | files | bytes | total, how many there are without this file}
local now, id, owner, store, bytes = time_ms(ARGV[1]), ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local begin, lease = ARGV[6] == '1', ARGV[7]
local max_files, max_bytes, max_total = tonumber(ARGV[8]), tonumber(ARGV[9]), tonumber(ARGV[10])
local file, tenant = key('file', id), tenant_of(owner)
local state = redis.call('HGET', file, 'state')
if state ~= 'writing' and (state or not begin) then return {'gone', 0} end
local files, used = usage(tenant)
local before = tonumber(redis.call('ZSCORE', key('file_bytes', tenant), id) or 0)
if not state and files >= max_files then return {'files', files} end
bytes = math.max(bytes, before)
if used - before + bytes > max_bytes then return {'bytes', used - before} end
local total = tonumber(redis.call('HGET', key('content_bytes'), store) or 0) - before
if max_total > 0 and total + bytes > max_total then return {'total', total} end
if not state then
  redis.call('HSET', file, 'id', id, 'owner', owner, 'store', store, 'state', 'writing', 'created', now, 'users', 0)
end
charge(id, tenant, store, bytes)
redis.call('ZADD', key('file_due'), after(now, lease), id)
return {'ok', 0}
