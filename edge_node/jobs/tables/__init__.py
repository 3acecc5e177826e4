"""The tables of the outbox, whose transactions (`store`) run in the thread of its file. Times are the box's own, s.

schema       its tables and queries, the row of a job, and rows that cannot be read
rows         one job at a time: read, saved, ended, deleted, told of; everything counted
acceptance   room for a new job
"""
