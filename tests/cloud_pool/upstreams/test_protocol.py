"""Our part of Triton's messages against the whole of them, which tritonclient ships."""

from __future__ import annotations

from tritonclient.grpc import service_pb2

from causeway_server.cloud_pool.upstreams.triton import protocol

MESSAGES = (
    *("ModelInferRequest", "ModelInferResponse", "ModelStreamInferResponse", "ServerReadyResponse"),
    *("RepositoryIndexResponse", "RepositoryModelLoadRequest", "RepositoryModelUnloadRequest"),
)


def test_each_field_is_tritons() -> None:
    """With its number, its type, and whether it is repeated."""

    def fields(message: object) -> dict[str, tuple[int, int, bool]]:
        found = {}
        for field in message.fields:  # type: ignore[attr-defined]
            found[field.name] = (field.number, field.type, field.is_repeated)
            if field.message_type is not None:
                inner = fields(field.message_type)
                found |= {f"{field.name}.{name}": value for name, value in inner.items()}
        return found

    for name in MESSAGES:
        ours, theirs = getattr(protocol, name).DESCRIPTOR, getattr(service_pb2, name).DESCRIPTOR
        assert fields(ours)
        assert fields(ours).items() <= fields(theirs).items(), name


def test_a_response_with_fields_that_we_do_not_know_is_read() -> None:
    reply = service_pb2.ModelStreamInferResponse()
    reply.infer_response.model_version = "3"
    reply.infer_response.parameters["a"].double_param = 0.5
    reply.infer_response.outputs.add(name="text_output", datatype="BYTES", shape=(1,))
    reply.infer_response.raw_output_contents.append(b"a")
    read = protocol.ModelStreamInferResponse.FromString(reply.SerializeToString()).infer_response
    assert ([output.name for output in read.outputs], list(read.raw_output_contents)) == (["text_output"], [b"a"])
