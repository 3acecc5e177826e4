#!lua flags=allow-oom
-- Record that the outcomes of the next lines are in the parts of the output files that were just written, and delete
-- their jobs. Only one of two workers that collect the same lines succeeds.
-- ARGV: now (unix ms), id, lines collected before, lines collected now, 1 if these lines never became jobs,
--   offset of the next line in the input file, 1 if a line expired, store, time until the files count as abandoned (ms),
--   job id without the line, then part, name and bytes of each part written
-- Reply: 1; 0 if another worker has collected these lines
local now, id, first, last, never_ran = time_ms(ARGV[1]), ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5] == '1'
local offset, expired, store, lease, job = ARGV[6], ARGV[7] == '1', ARGV[8], ARGV[9], ARGV[10]
local batch = key('batch', id)
local f = redis.call('HMGET', batch, 'collected', 'owner', 'submitted')
if tonumber(f[1] or -1) ~= first or (never_ran and tonumber(f[3]) ~= first) then return 0 end
for i = 11, #ARGV, 3 do
  local name = output_file(id, ARGV[i])
  local file, bytes = key('file', name), ARGV[i + 2]
  if redis.call('EXISTS', file) == 0 then
    redis.call('HSET', file, 'id', name, 'owner', f[2], 'store', store, 'state', 'writing', 'created', now, 'users', 0,
      'filename', id .. '_' .. ARGV[i] .. '.jsonl', 'purpose', 'batch_output', 'bytes', 0)
  end
  redis.call('RPUSH', key('file', name, 'parts'), ARGV[i + 1] .. ':' .. bytes)
  charge(name, tenant_of(f[2]), store, redis.call('HINCRBY', file, 'bytes', bytes))
  redis.call('ZADD', key('file_due'), after(now, lease), name)
end
redis.call('HSET', batch, 'collected', last)
if expired then redis.call('HSET', batch, 'late', 1) end
if never_ran then
  redis.call('HSET', batch, 'submitted', last, 'offset', offset)
  redis.call('HINCRBY', batch, 'ended', last - first)
  redis.call('HINCRBY', batch, 'failed', last - first)
  return 1
end
for line = first + 1, last do
  local name = job .. string.format('%.0f', line)
  redis.call('DEL', key('result', name), key('events', name))
  -- A dead letter stays for the operator; nobody may run it again, so its request goes.
  if redis.call('HGET', key('job', name), 'state') == 'dead' then redis.call('HDEL', key('job', name), 'body')
  else redis.call('DEL', key('job', name)) end
end
return 1
