"""Jobs of this device: requests that are accepted now, also offline, and answered later.

entry      the handlers of /v1/jobs; opens the rest with the first job, or if there is a file
api        /v1/jobs over HTTP, in the gateway's shape, and acceptance of jobs, whichever way they come in
store      the outbox: one SQLite file, committed before a job is acknowledged
tables     its tables
running    runs jobs on the service
events     a job's events as server-sent events
"""

PATH = "/v1/jobs"
FILE = "jobs-2.sqlite"
"""The outbox, in the state folder."""
