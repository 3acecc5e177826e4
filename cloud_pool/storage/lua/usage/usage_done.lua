#!lua flags=allow-oom
-- Delete a batch that is in the tenants' usage.
-- ARGV: id of the batch
-- Reply: 1; 0 if another worker has deleted it
if redis.call('HGET', key('usage_batch'), 'id') ~= ARGV[1] then return 0 end
return redis.call('DEL', key('usage_batch'))
