#!lua
-- Count a delivery of each message, and tell what is known of it.
-- ARGV: name, owner or '', ttl (ms), effects
-- Reply: for each effect {attempts, state, outcome, position}; nothing if another process holds the lease
local name, owner, ttl = ARGV[1], ARGV[2], ARGV[3]
if not holds_topic(name, owner) then return {} end
local found = {}
for i = 4, #ARGV do
  local effect = effect_key(name, ARGV[i])
  local state, outcome, position = unpack(redis.call('HMGET', effect, 'state', 'outcome', 'position'))
  local attempts = 0
  if not state then
    attempts = redis.call('HINCRBY', effect, 'attempts', 1)
    redis.call('PEXPIRE', effect, ttl)
  end
  found[#found + 1] = {attempts, state or '', outcome or '', position or ''}
end
return found
