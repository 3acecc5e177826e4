"""Runs jobs on the service.

runner      takes jobs of the outbox, and bounds what runs where
run         one run of a job
revisions   answers that are made anew when a late part was read
cancelling  tells the cloud of jobs that were cancelled here
cloud_gate  when jobs may go to the cloud
webhooks    tells receivers that jobs have ended
reply       a job's answer, collected
"""
