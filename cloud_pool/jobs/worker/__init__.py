"""A worker process: claims jobs, runs them on the gateway's own service, and reports their outcomes.

worker          claims, leases, drain
slots           how many jobs of a tier may run now, and which priority a free slot prefers
reports         outcome of a run -> the job store
revisions       answers without late parts -> answers with them
live_text       text of the runs in progress -> Redis, while clients follow their jobs
execution       one run: stored request -> OpenAI's body
runner          what answers: the service behind the shared cache
metered_runner  tenant limits, usage and audit of each run
failure_policy  outcome of a failed run
"""
