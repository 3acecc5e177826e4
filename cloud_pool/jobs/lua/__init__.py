"""Lua scripts of the job store. Each runs in Redis atomically and can be repeated, since its reply may get lost.

`scripts.py` loads them; `common.lua`, `fair_queue.lua`, `endings.lua` and `billing.lua` precede every script,
`webhooks/delivery.lua` some of those on webhooks, `batches/files.lua` those on files.

Keys, all below the configured prefix:

    layout                           string  version of these keys and records; every script refuses another one
    job:<id>                         hash    the record; `fence` rises with each claim, `cost` is tokens over weight
                                             `reported` the fence of the last report
    result:<id>                      string  body of the answer
    events:<id>                      stream  the job's events, for SSE
    queue:<tier>:<priority>          hash    `queued` jobs of all tenants, and `virtual` time of their fair queue
    queue:<tier>:<priority>:<tenant> zset    a tenant's queued jobs, by the number of their acceptance
    turns:<tier>:<priority>          zset    tenants whose jobs may be claimed, by their tag: the lowest is next
    tags:<tier>:<priority>           zset    tags of tenants that take no turns, for an hour
    leases:<tier>:<priority>         zset    running jobs by the end of their lease, unix ms
    wake:<tier>                      list    at most 64 tokens; a worker without jobs waits for one
    accepted                         string  how many jobs were ever accepted
    waiting, deadlines               zset    job by the time of its next attempt and by its deadline, unix ms
    blocked                          zset    tenants over a rate or budget, by the time that their jobs try again
    open:<tenant>                    zset    unfinished jobs of a tenant, by time of acceptance
    open_bytes                       hash    bytes of the requests of each tenant's unfinished jobs
    jobs:<owner>                     zset    all jobs of an owner, by time of acceptance
    idempotency:<owner>:<key>        hash    id and body digest of a job; lives as long as the job's record
    dead                             stream  dead letters
    tiers                            set     tiers that ever had a job, for metrics and promotion
    webhook:<id>                     hash    a delivery: job, owner, url, state, finished, `attempts` made, `fence`
    webhooks:<tenant>:<receiver>     zset    deliveries that wait, by due time; a receiver is `https://host:port`
    webhooks, webhooks:<tenant>      zset    tenants, and a tenant's receivers, by when a claim looks at them next
    webhook_leases:<tenant>          zset    deliveries that are being sent, by the end of their lease
    webhook_receiver:<tenant>:<receiver>  hash  `running` deliveries, `failures` in a row; as long as it has any
    webhook_receivers                zset    `<tenant> <receiver>` with deliveries, by the end of its pause or 0
    webhooks_pending                 string  number of deliveries
    webhook_disabled:<owner>:<sha1>  string  this URL of the owner answered 410 Gone
    webhook_secret:<owner>           hash    current; previous, which is valid until `until`
    usage                            hash    what accepted reports have billed: `<tenant>|<days since 1970>|<field>`
    usage_batch                      hash    the part of it that is being moved to the tenants' usage, with its `id`
    file:<id>                        hash    a file's record; `users` open batches read it
    file:<id>:parts                  list    name:bytes of the file's parts
    files:<owner>                    zset    visible files by time of creation
    file_bytes:<tenant>              zset    all files of a tenant by the bytes that it is charged with
    file_due                         zset    files by the time when their content is deleted
    content_bytes                    hash    bytes by content store
    content:<file>                   hash    parts of a file whose content is in Redis
    batch:<id>                       hash    the record; `submitted` lines have become jobs, `ended` of them have ended,
                                             the first `collected` lines are in the output files
    batches:<owner>, batches         zset    batches by time of creation; unfinished ones by their next processing step
    tenant_batches:<tenant>          zset    batches by the time when they no longer count in the quotas
"""
