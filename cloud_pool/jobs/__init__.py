"""Asynchronous jobs on Redis: each is accepted once, runs at least once, and has exactly one effect.

    http/        /v1/jobs, /v1/webhooks/secret
    submission   a caller's body -> a checked job
    worker/      claims jobs for its free slots, runs them on the gateway's own service, reports

`storage` has their records, `batches` OpenAI's batches of them.

`router.jobs.job` is the table of a job's life. The scripts use that table, and no other code changes a job's state.
Every claim increments the job's `fence`. A worker that was presumed dead, or whose job was cancelled, holds an old
fence, and its report is refused: a second run of a job never has a second effect.

docs/explanation/jobs.md describes the guarantees of an acceptance on disk and with replicas, and how a caller repeats a
request whose outcome it does not know. `storage.durability` refuses jobs on a Redis whose settings break that promise.
"""
