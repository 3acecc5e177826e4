"""One Triton server over gRPC.

Reading order: `client` (one request, and the repair of a dead model), `tensors` with `sampling_parameters` and
`logprobs` (what is on the wire), `grpc_stream` (one call), `cancellation` (how a call ends), `connection`, `errors`.
"""
