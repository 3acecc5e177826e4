"""Files and batches in Redis.

file:<id>              hash     the file's record; file:<id>:parts: its bytes, in a list of pieces
files:<owner>          zset     by time of making
batch:<id>             hash     the record; `fed` lines are jobs, `settled` of them have ended
batch:<id>:parts       list     the input as it was when the batch was made; :names, what each line is called
batches:<owner>        zset     by time of making; batches: the unfinished, by when to look at them next
"""

from __future__ import annotations

from typing import Final

from .common import COMMON

_FILE_PUT = """
local now, id, owner, most, ttl = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5]
local file, parts = key('file', id), key('file', id, 'parts')
if redis.call('EXISTS', file) == 1 then return 1 end
local pieces = tonumber(ARGV[6])
if most > 0 then
  for _, old in ipairs(redis.call('ZRANGE', key('files', owner), 0, -1)) do
    if redis.call('EXISTS', key('file', old)) == 0 then redis.call('ZREM', key('files', owner), old) end
  end
  if redis.call('ZCARD', key('files', owner)) >= most then return 0 end
end
for at = 7, 6 + pieces do redis.call('RPUSH', parts, ARGV[at]) end
if pieces > 0 then redis.call('PEXPIRE', parts, ttl) end
redis.call('HSET', file, 'id', id, 'owner', owner, 'created', now, 'expires', tonumber(now) + tonumber(ttl))
for at = 7 + pieces, #ARGV, 2 do redis.call('HSET', file, ARGV[at], ARGV[at + 1]) end
redis.call('PEXPIRE', file, ttl)
redis.call('ZREMRANGEBYSCORE', key('files', owner), '-inf', tonumber(now) - tonumber(ttl))
redis.call('ZADD', key('files', owner), now, id)
return 1
"""

_BATCH_CREATE = """
local now, id, owner, file, digest = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local batch = key('batch', id)
local known = redis.call('HGET', batch, 'digest')
if known then return known == digest and 'known' or 'conflict' end
local f = redis.call('HMGET', key('file', file), 'owner', 'purpose')
if f[1] ~= owner or f[2] ~= 'batch' then return 'absent' end
redis.call('COPY', key('file', file, 'parts'), key('batch', id, 'parts'))
redis.call('PERSIST', key('batch', id, 'parts'))
redis.call('HSET', batch, 'id', id, 'owner', owner, 'input', file, 'digest', digest, 'created', now,
  'state', 'validating', 'total', 0, 'fed', 0, 'settled', 0, 'completed', 0, 'failed', 0)
for at = 6, #ARGV, 2 do redis.call('HSET', batch, ARGV[at], ARGV[at + 1]) end
redis.call('ZADD', key('batches', owner), now, id)
redis.call('ZADD', key('batches'), now, id)
return 'made'
"""

_BATCH_CLAIM = """
local now, lease = ARGV[1], tonumber(ARGV[2])
local due = redis.call('ZRANGEBYSCORE', key('batches'), '-inf', now, 'LIMIT', 0, 1)
if not due[1] then return '' end
redis.call('ZADD', key('batches'), now + lease, due[1])
return due[1]
"""

_BATCH_LOOK = """
if redis.call('EXISTS', key('batch', ARGV[1])) == 0 then redis.call('ZREM', key('batches'), ARGV[1]) return 0 end
redis.call('ZADD', key('batches'), 'XX', ARGV[2], ARGV[1])
return 1
"""

_BATCH_MOVE = """
local now, id, to, over, ttl = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local batch, state, legal = key('batch', id), redis.call('HGET', key('batch', id), 'state'), false
if state == to then return 2 end
local sources = tonumber(ARGV[6])
for at = 7, 6 + sources do legal = legal or ARGV[at] == state end
if not legal then return 0 end
redis.call('HSET', batch, 'state', to, to .. '_at', now)
for at = 7 + sources, #ARGV, 2 do redis.call('HSET', batch, ARGV[at], ARGV[at + 1]) end
if over == '1' then
  redis.call('ZREM', key('batches'), id)
  redis.call('DEL', key('batch', id, 'parts'))
  redis.call('PEXPIRE', batch, ttl)
  redis.call('PEXPIRE', key('batch', id, 'names'), ttl)
else
  redis.call('ZADD', key('batches'), now, id)
end
return 1
"""

_BATCH_NAMES = """
local names = key('batch', ARGV[1], 'names')
redis.call('DEL', names)
for at = 2, #ARGV do redis.call('RPUSH', names, ARGV[at]) end
return 1
"""

_BATCH_JOBS = """
local names, first, found = key('batch', ARGV[1], 'names'), tonumber(ARGV[2]), {}
local custom = redis.call('LRANGE', names, first - 1, first + #ARGV - 4)
for at = 3, #ARGV do
  local f = redis.call('HMGET', key('job', ARGV[at]), 'state', 'error')
  local result = redis.call('GET', key('result', ARGV[at]))
  table.insert(found, {custom[at - 2] or '', f[1] or '', f[2] or '', result or ''})
end
return found
"""

BATCH_SCRIPTS: Final = {
    "file_put": COMMON + _FILE_PUT,
    "batch_create": COMMON + _BATCH_CREATE,
    "batch_claim": COMMON + _BATCH_CLAIM,
    "batch_look": COMMON + _BATCH_LOOK,
    "batch_move": COMMON + _BATCH_MOVE,
    "batch_names": COMMON + _BATCH_NAMES,
    "batch_jobs": COMMON + _BATCH_JOBS,
}
