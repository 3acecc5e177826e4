#!lua flags=allow-oom
-- Read how much a tenant's files and a store hold.
-- ARGV: owner, store
-- Reply: {files of the tenant, their bytes, bytes in the store}
local files, bytes = usage(tenant_of(ARGV[1]))
return {files, bytes, tonumber(redis.call('HGET', key('content_bytes'), ARGV[2]) or 0)}
