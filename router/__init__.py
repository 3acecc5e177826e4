"""The pure part of Causeway: requests, policies and decisions as values.

Nothing here opens a socket, reads a file or reads a clock: bytes, values and ``now`` come in, values go out.
Reading order: types, errors, openai (bytes → Request, Chunk → bytes), policy, decision, checks. Beside them: trackers
(breaker, spending), parts (sounds and pictures), tool_calls, reasoning, jobs, realtime (live sessions), bundle (what a
fleet gives a box), api (OpenAPI documents), documents (strict YAML), sse (server-sent events), telemetry.
"""
