"""A Triton server over gRPC.

Reading order: `client` (one request, and the repair of a dead model), `calls` (the connection, one call and how it
ends), `tensors` and `messages` (the wire format), `errors`, `model_control`.
"""
