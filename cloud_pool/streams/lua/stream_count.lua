#!lua flags=allow-oom
-- Change the attempts of a message that has no outcome yet, and bill the run that failed.
-- ARGV: name, effect, change, bill or ''
local effect = effect_key(ARGV[1], ARGV[2])
if redis.call('HEXISTS', effect, 'state') == 0 and redis.call('EXISTS', effect) == 1 then
  redis.call('HINCRBY', effect, 'attempts', ARGV[3])
end
bill_run(ARGV[4], time_ms(-1))
return 1
