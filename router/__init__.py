"""The pure part of Causeway: requests, policies and decisions as values.

Nothing here opens a socket, reads a file or reads a clock: bytes, values and ``now`` come in, values go out.
Reading order: types, errors, openai (bytes → Request, Chunk → bytes), policy, decision, checks. Beside them: documents
(strict YAML), tool_calls, sse (server-sent events), telemetry (names of trace attributes).
"""
