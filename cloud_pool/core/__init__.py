"""What every part of a request's way shares.

request_context   a request with its tier, and the answer's head and pieces
principal         its caller, and what the caller's token grants
body_memory       the requests in progress, and the memory of their bodies
late              the parts of a job that are read on after its answer
"""
