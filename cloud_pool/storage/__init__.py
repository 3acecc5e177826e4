"""The records of jobs, batches, uploaded files and webhooks in Redis, and the stores of file contents.

config           the section `jobs`
stores           all stores over one connection pool
redis_client     commands and scripts; `scripts` loads those of `lua/` and lists the keys
durability       whether Redis keeps what it has accepted
encryption       content at rest
jobs/            accept, claim, report
files/           uploaded files: records and quotas in Redis, contents in Redis, a folder or a bucket
batches/         batches, and the table of a batch's life
webhook_outbox   pending deliveries and signing secrets, for the sender of `router.serving.webhooks`
usage_outbox     bills on their way to the tenants' usage
"""
