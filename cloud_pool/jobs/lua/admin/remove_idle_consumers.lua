#!lua flags=allow-oom
-- Remove consumers that hold no entry and have been idle for longer than ARGV[1] ms.
-- Reply: how many were removed
local removed = 0
for _, tier in ipairs(redis.call('SMEMBERS', key('tiers'))) do
  for _, priority in ipairs({'interactive', 'standard', 'bulk'}) do
    local q = queue(tier, priority)
    if redis.call('EXISTS', q) == 1 then
      for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', q, 'workers')) do
        local f = {}
        for i = 1, #consumer, 2 do f[consumer[i]] = consumer[i + 1] end
        if f['pending'] == 0 and f['idle'] > tonumber(ARGV[1]) then
          redis.call('XGROUP', 'DELCONSUMER', q, 'workers', f['name'])
          removed = removed + 1
        end
      end
    end
  end
end
return removed
