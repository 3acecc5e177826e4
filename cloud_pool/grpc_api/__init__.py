"""The gRPC service `causeway.v1.Generation`, which takes HTTP's requests. It is off unless `grpc.port` is set.

    generation.proto   the service, published; `generation.binpb` is made from it by `python -m tests.check.protos`
    messages           the message classes
    request_input      InputChunks → the body of an HTTP request → Request
    answer_output      Chunks → OutputChunks, and their delivery to a client that may read slowly
    calls              one call from its metadata to its status
    server             the address: its connections, calls, health, reflection, bounds, drain

There is no second pipeline: `http.request_admission` admits a call's request and `http.request_runner` answers it.
"""
