"""Worker processes: the `messages` that both sides exchange, the `child` that runs the worker, and the `parent` that
sends it jobs.
"""
