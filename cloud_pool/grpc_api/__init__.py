"""The gRPC service `causeway.v1.Generation`, off unless `grpc.port` is set: the same requests as over HTTP.

    generation.proto   the service, published; `generation.binpb` is made from it by `python -m tests.check.protos`
    messages           the message classes
    request_input      InputChunks → the body of an HTTP request → Request
    added_parts        text, sounds and pictures that come in chunks of their own
    answer_output      Chunks → OutputChunks, and their delivery
    outbox             the messages on their way to one client, which may read slowly
    statuses           errors → status codes and trailing metadata
    calls              one call from its metadata to its status
    front              the public socket, whose bytes are relayed to gRPC: idle connections make room
    server             the address: calls, health, reflection, bounds, drain

There is no second pipeline: `http.request_admission` admits a call's request and `http.request_runner` answers it.
"""
