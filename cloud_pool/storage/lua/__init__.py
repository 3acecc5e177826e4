"""Lua scripts of the job store. Each runs in Redis atomically and can be repeated, since its reply may get lost.

`scripts.py` loads them; `common.lua`, `fair_queue.lua`, `endings.lua`, `revisions.lua` and `billing.lua` precede every
script, `webhooks/delivery.lua` some of those on webhooks, `batches/files.lua` those on files.

The keys are in ../../redis/keys.py. Of the hashes:

    job:<id>     `fence` rises with each claim, `cost` is tokens over weight, `reported` the fence of the last report;
                 `late` kinds of part may revise its answer until `late_until`, `claims` of its late answer
    webhook:<id> job, owner, url, state, finished, `attempts` made, `fence`; `event` and `revision` of an answer
    file:<id>    `users` open batches read it
    batch:<id>   `submitted` lines have become jobs, `ended` of them have ended, the first `collected` lines are in the
                 output files
"""
