#!lua flags=allow-oom
-- The outcomes of these messages are published: only that is kept.
-- ARGV: name, ttl (ms), effects
for i = 3, #ARGV do
  local effect = effect_key(ARGV[1], ARGV[i])
  redis.call('DEL', effect)
  redis.call('HSET', effect, 'state', 'published')
  redis.call('PEXPIRE', effect, ARGV[2])
end
return 1
