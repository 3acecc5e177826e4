"""The transactions of the outbox, which run in the thread of its file. Times are the box's own, s.

schema       its tables and queries, and the row of a job
bodies       requests and results, of which nothing stays when they are deleted
values       what the transactions take and return
rows         one job at a time: read, saved, ended, deleted; everything counted
replies      when answers are sent
webhooks     when receivers are told
revisions    what may still revise an answer
acceptance   room for a new job
callers      what the owner of a job and operators ask for
runs         what the runner claims and reports
"""
