"""The transactions of the outbox, which run in the thread of its file. Times are the box's own, s.

schema       its tables and queries, the row of a job, and rows that cannot be read
rows         one job at a time: read, saved, ended, deleted, told of; everything counted
webhooks     when receivers are told
revisions    what may still revise an answer
acceptance   room for a new job
callers      what the owner of a job and operators ask for
runs         what the runner claims and reports
"""
