"""Asynchronous jobs on Redis: accepted once, run at least once, with exactly one effect.

    http/        /v1/jobs, /v1/webhooks/secret
    submission   a caller's body -> a checked job
    worker/      claims jobs for its free slots, runs them on the gateway's own service, reports

`storage` has their records, `batches` OpenAI's batches of them.

`router.jobs.job` is the table of a job's life. The scripts use that table, and no other code changes a job's state.
Every claim increments the job's `fence`. A worker that was taken for dead, or whose job was cancelled, holds an old
fence, and its report is refused: a second run of a job never has a second effect.

Accepted means: the gateway sends 202 after Redis has answered, and with `appendonly yes, appendfsync always` Redis
answers after the record is on disk. `storage.durability` refuses jobs on a Redis with weaker settings. Behind Sentinels
the gateway waits longer (WAIT): until each replica that could be promoted has the record. A write that too few replicas
confirm is not undone by that: the caller gets 503 and repeats it.

When the connection breaks while a job is being accepted, the caller gets 503 and cannot know the outcome. With an
`Idempotency-Key` it sends the same request again and gets the same job; without one it may get a second job.
"""
