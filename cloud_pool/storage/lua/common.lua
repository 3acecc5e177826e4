-- Shared by all job scripts; fair_queue.lua, endings.lua and billing.lua follow. KEYS[1] is the prefix of
-- all keys; the table of keys is in ../../redis/keys.py. LAYOUT, from ../../redis/layout.py, and
-- TRANSITIONS[state][event], the next state or nil, from states.py precede this text.
local P = KEYS[1]
local function key(...) return P .. ':' .. table.concat({...}, ':') end

-- A process of another layout, old or new, changes nothing.
local layout = redis.call('GET', key('layout'))
if layout and layout ~= LAYOUT then return redis.error_reply('LAYOUT ' .. layout) end

-- The time, unix ms, as a string. A negative argument stands for Redis's own clock, which all processes share: one with
-- a wrong clock harms no job. Tests pass a time of theirs.
local function time_ms(argument)
  if tonumber(argument) >= 0 then return argument end
  local time = redis.call('TIME')
  return string.format('%.0f', tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000))
end
local function after(now, ms) return string.format('%.0f', tonumber(now) + tonumber(ms)) end

-- As in router/jobs/submission.py: a digest of an earlier release cannot be compared, so its key alone decides.
local function is_same_request(known, digest)
  return known == digest or (string.sub(digest, 1, 5) == 'json:' and string.sub(known, 1, 5) ~= 'json:')
end

local function tenant_of(owner) return string.match(owner or '', '^[^/]*') end

-- Apply an event to a record. Returns the next state, or nil for an illegal transition, which changes nothing.
local function transition(record, event)
  local state = redis.call('HGET', record, 'state')
  if not state then return nil end
  local row = TRANSITIONS[state]  -- none for a state of another version
  local to = row and row[event]
  if to then redis.call('HSET', record, 'state', to) end
  return to
end

-- Append an event to the job's stream, which GET /v1/jobs/{id}/events serves. `run` is the fence of a run that begins.
local function publish_event(id, event, data, run)
  redis.call('XADD', key('events', id), 'MAXLEN', '~', 100, '*', 'event', event, 'data', data or '', 'run', run or '')
end

-- Append an event in place of the last ones if these are `names`, newest first: repetitions do not grow the stream.
local function publish_instead_of(names, id, event, data)
  local last = redis.call('XREVRANGE', key('events', id), '+', '-', 'COUNT', #names)
  local repeated = #last == #names
  for i, entry in ipairs(last) do repeated = repeated and entry[2][2] == names[i] end
  if repeated then for _, entry in ipairs(last) do redis.call('XDEL', key('events', id), entry[1]) end end
  publish_event(id, event, data)
end
