"""The part that all of Causeway shares: requests, policies and decisions as values, and the room `serving`, which
touches sockets.

Nothing outside of that room opens a socket, reads a file or reads a clock: bytes, values and ``now`` come in, values go
out.
Reading order: types, errors, openai (bytes → Request, Chunk → bytes), policy, decision, checks. Others: trackers
(breaker, spending), parts (audio and images), tool_calls, reasoning, jobs, realtime (live sessions), bundle (what a
fleet gives a device), api (OpenAPI documents), documents (strict YAML), config (limits and sections of configurations).
"""
