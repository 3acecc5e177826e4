"""Lua scripts of the shared cache. Each runs in Redis atomically. `scripts.py` loads them after `common.lua`.

KEYS[1] is `<prefix>:{<key>}`: all keys of one answer are in one hash slot.

    ...:entry                 hash    at (ms), value: the answer
    ...:lease:<rank>          hash    fence, open (1 while held), until (ms), home (channel of the leader's gateway),
                                      wanted (ms: a follower on another gateway waits until then). Fences never repeat
    ...:flow:<rank>:<fence>   stream  kind and data: `chunks`, `end` (the last chunks), `failed`, or `wake`, for an
                                      answer that ended before its leader learned that a follower waits

A rank is a priority: an urgent request never follows a leader that queues behind it. Times are Redis's own, in ms, so
that gateways with different clocks agree; tests pass a time instead (ARGV[1] >= 0). Every key has a time to live.
"""
