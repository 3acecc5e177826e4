"""A worker process: it claims jobs, runs them on the gateway's own service, and reports their outcomes.

worker          claims, leases, drain, and the text of runs for clients that follow their jobs
execution       one run in a slot: stored request -> OpenAI's body -> its report to the job store
runner          the service behind the shared cache, with tenant limits, usage and audit of each run
"""
