"""One Triton server over gRPC.

Reading order: `client` (one request, and the repair of a dead model), `calls` (the connection, one call and how it
ends), `tensors` and `messages` (what is on the wire), `errors`, `model_control`.
"""
