#!lua
-- Keep the outcome of a message until it is published, and bill the run that made it.
-- ARGV: name, owner or '', ttl (ms), effect, run, outcome, position in the topic of outcomes, bill or ''
-- Reply: 1; 0 if another run has recorded an outcome; -1 if another process holds the lease
local name, owner, ttl, run = ARGV[1], ARGV[2], ARGV[3], ARGV[5]
if not holds_topic(name, owner) then return -1 end
local effect = effect_key(name, ARGV[4])
local state, recorded_by = unpack(redis.call('HMGET', effect, 'state', 'run'))
if state then return recorded_by == run and 1 or 0 end
redis.call('HSET', effect, 'state', 'recorded', 'run', run, 'outcome', ARGV[6], 'position', ARGV[7])
redis.call('PEXPIRE', effect, ttl)
bill_run(ARGV[8], time_ms(-1))
return 1
