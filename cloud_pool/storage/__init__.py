"""Records of jobs, batches, uploaded files and webhooks in Redis, and the stores of file contents.

config          the section `jobs`
stores          all stores over one connection pool, and the scripts of `lua/`
redis_client    runs commands and scripts
durability      whether Redis keeps accepted data
encryption      content at rest
record          a job as submitted, as stored and as shown, and the results of the job store
job_store       accept, claim, report; `live_answers` has the text of running jobs
file_store      uploaded files: records and quotas in Redis; `file_contents` in Redis, a folder or a bucket
batch_store     batches, and the table of a batch's life
outboxes        pending deliveries of webhooks with their secrets, and bills on their way to the tenants' usage
"""
