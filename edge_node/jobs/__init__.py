"""Jobs of this device: requests that are accepted now, also offline, and answered later.

entry      the handlers of /v1/jobs; opens the rest with the first job, or if there is a file
api        /v1/jobs and events of jobs over HTTP, and acceptance of jobs, whichever way they come in
store      the outbox: one SQLite file, committed before a job is acknowledged; in a thread
schema     its tables and queries, the row of a job, and rows that cannot be read
rows       one job at a time: read, saved, ended, deleted, told of; everything counted
acceptance room for a new job
runner     takes jobs of the outbox, and bounds what runs where and when the cloud is asked
run        one run of a job, its answer, collected and shown while it is made, and made anew when a late part was read
webhooks   tells receivers that jobs have ended, and the cloud of jobs that were cancelled here
"""

PATH = "/v1/jobs"
FILE = "jobs-2.sqlite"
"""The outbox, in the state folder."""
