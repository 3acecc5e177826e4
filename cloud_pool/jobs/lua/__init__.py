"""Lua scripts of the job store. Each runs in Redis atomically and can be repeated, since its reply may get lost.

`scripts.py` loads them; `common.lua`, `fair_queue.lua`, `endings.lua` and `billing.lua` precede every script,
`webhooks/delivery.lua` some of those on webhooks, `batches/files.lua` those on files.

The keys are in ../../redis/keys.py. Of the hashes:

    job:<id>     `fence` rises with each claim, `cost` is tokens over weight, `reported` the fence of the last report
    webhook:<id> job, owner, url, state, finished, `attempts` made, `fence`
    file:<id>    `users` open batches read it
    batch:<id>   `submitted` lines have become jobs, `ended` of them have ended, the first `collected` lines are in the
                 output files
"""
