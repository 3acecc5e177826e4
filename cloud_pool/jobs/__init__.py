"""Asynchronous jobs on Redis: accepted once, run at least once, with exactly one effect.

    accept      record, queue entry and idempotency key in one script         store, scripts
    claim       a batch sized to the tier's free places, priorities by weight  worker, shares
    run         the same service that answers interactive requests             runner
    report      only the holder of the newest fence may end a job              verdicts, store
    tell        events (SSE), webhooks (outbox in the same script)             events, webhooks, delivery
    batches     OpenAI's /v1/files and /v1/batches over the same jobs          batches, feeder

A job's life is the table in `states`; the scripts get that table, and no other code moves a job. Every claim raises
the job's `fence`. A worker that was thought dead, or whose job was cancelled, holds an old fence: what it reports is
refused, so a second run of a job never has a second effect.

What "accepted" means: 202 is sent after Redis has answered, and with `appendonly yes, appendfsync always` it answers
after the record is on its disk. `durability` refuses to start on anything less. A Redis that fails over to a replica
may lose what the replica had not yet received: WAIT is not used, for it would not be undone where too few answer.

When the connection breaks while a job is being accepted, the caller gets 503 and cannot know: with an
`Idempotency-Key` it sends the same again and gets the same job; without one it may get a second.

All keys share one hash tag (`{causeway}`), so that scripts also run on Redis Cluster, in one slot.
"""
