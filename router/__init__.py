"""The pure part of Causeway: requests, policies and decisions as values.

Nothing here opens a socket, reads a file or looks at a clock: bytes, values and ``now`` come in, values go out.
Reading order: types, errors, openai (wire → Request, Chunk → wire), policy, decide, attempt.
"""
