"""Types shared by all stages of a request.

request_context   a request with its tier, the answer's head and pieces, and the memory of the bodies in progress
principal         the caller, and the grants of its token
"""
