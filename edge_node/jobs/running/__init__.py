"""Runs jobs on the service.

runner     takes jobs of the outbox, and bounds what runs where and when the cloud is asked
run        one run of a job, its answer, collected and shown while it is made, and made anew when a late part was read
webhooks   tells receivers that jobs have ended, and the cloud of jobs that were cancelled here
"""
