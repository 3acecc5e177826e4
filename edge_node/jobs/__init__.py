"""Jobs of this device: requests that are accepted at once, also offline, and answered later.

lazy_jobs  the handlers of /v1/jobs; opens the other parts with the first job, or if their file exists
api        /v1/jobs and events of jobs over HTTP, and acceptance of jobs from every source
store      the outbox: one SQLite file, committed before a job is acknowledged; in a thread
schema     its tables and queries, the row of a job, and unreadable rows
rows       one job at a time: reading, saving, ending, deleting, notifications; all counts
acceptance room for a new job
runner     takes jobs of the outbox, and limits where they run and when they are sent to the cloud
run        one run of a job: its answer, shown while it is made
webhooks   notifies receivers of jobs that have ended, and the cloud of jobs that were cancelled here
"""

PATH = "/v1/jobs"
FILE = "jobs-3.sqlite"
"""File name of the outbox, in the state folder."""
