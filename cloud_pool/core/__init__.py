"""What every part of a request's way shares.

request_context   a request with its tier, the answer's head and pieces, and the memory of the bodies in progress
principal         its caller, and what the caller's token grants
late              the parts of a job that are read on after its answer
"""
