#!lua flags=allow-oom
-- Read the batch that is being moved to the tenants' usage. If there is none, what was billed since becomes the next.
-- ARGV: id of a new batch
-- Reply: HGETALL of the batch: id, and amounts by `<tenant>|<days since 1970>|<field>`; empty: nothing was billed
local batch = key('usage_batch')
if redis.call('EXISTS', batch) == 0 and redis.call('EXISTS', key('usage')) == 1 then
  redis.call('RENAME', key('usage'), batch)
  redis.call('HSET', batch, 'id', ARGV[1])
end
return redis.call('HGETALL', batch)
