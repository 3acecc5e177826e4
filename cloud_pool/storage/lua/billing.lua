-- What reports bill. Shared by all job scripts, after endings.lua.

-- Add what a run has used to `usage`, from where workers move it to the usage of its tenant. `bill` is JSON or ''.
local function bill_run(bill, now)
  if bill == '' then return end
  local run = cjson.decode(bill)
  local prefix = string.format('%s|%.0f|', run.tenant, math.floor(tonumber(now) / 86400000))
  for field, amount in pairs(run.amounts) do
    if amount ~= 0 then redis.call('HINCRBY', key('usage'), prefix .. field, string.format('%.0f', amount)) end
  end
  if run.release ~= '' then redis.call('HSET', key('usage'), prefix .. 'release|' .. run.release, 1) end
end

-- Accept the report of a run that still owns its job, and bill it. Returns false, and the script's reply, if it does not:
-- 1 if this report was accepted before and its reply was lost, else 0.
local function accept_report(record, fence, bill, now)
  if not holds_lease(record, fence) then
    return false, redis.call('HGET', record, 'reported') == fence and 1 or 0
  end
  redis.call('HSET', record, 'reported', fence)
  bill_run(bill, now)
  return true
end
