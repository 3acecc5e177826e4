-- Shared by all scripts of pipelines; the common parts of the jobs' scripts come before it.

-- Whether `owner` may go on: it holds the pipeline's lease, or the broker needs none ('').
local function holds_topic(name, owner)
  return owner == '' or redis.call('GET', key('stream', name)) == owner
end

local function effect_key(name, effect) return key('effect', name, effect) end
