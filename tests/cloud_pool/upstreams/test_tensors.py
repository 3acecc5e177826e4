from __future__ import annotations

import struct

import msgspec
import pytest
from tritonclient.grpc import service_pb2

from causeway_server.cloud_pool.upstreams.inference import Delta, InferenceRequest
from causeway_server.cloud_pool.upstreams.triton.messages import SamplingParameters, decode_logprobs, encode_logprobs
from causeway_server.cloud_pool.upstreams.triton.tensors import read_delta, to_infer_request
from causeway_server.router.errors import CloudFailed
from causeway_server.router.types import TokenAlternative, TokenLogprob


def texts(*values: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(value)) + value for value in values)


def response(final: bool = False, **tensors: bytes) -> service_pb2.ModelInferResponse:
    made = service_pb2.ModelInferResponse()
    for name, raw in tensors.items():
        made.outputs.add(name=name)
        made.raw_output_contents.append(raw)
    made.parameters["triton_final_response"].bool_param = final
    return made


def test_request_has_the_tensors_of_the_vllm_backend() -> None:
    parameters = SamplingParameters(max_tokens=3, logprobs=2)
    request = to_infer_request(
        InferenceRequest(model="m", prompt="h\u00e9", parameters=parameters, deadline=0.0), left_s=1.5
    )
    sent = {tensor.name: (tensor.datatype, list(tensor.shape)) for tensor in request.inputs}
    assert sent == {
        "text_input": ("BYTES", [1]),
        "sampling_parameters": ("BYTES", [1]),
        "stream": ("BOOL", [1]),
        "exclude_input_in_output": ("BOOL", [1]),
        "return_finish_reason": ("BOOL", [1]),
        "return_num_input_tokens": ("BOOL", [1]),
        "return_num_output_tokens": ("BOOL", [1]),
        "return_logprobs": ("BOOL", [1]),
    }
    assert request.raw_input_contents[0] == texts("h\u00e9".encode())
    assert request.parameters["causeway_deadline_ms"].int64_param == 1500


@pytest.mark.parametrize(("reason", "read"), [(b"None", None), (b"stop", "stop")])
def test_response_of_a_sequence(reason: bytes, read: str | None) -> None:
    delta = read_delta(
        response(
            final=True,
            text_output=texts("\u00fc".encode()),
            finish_reason=texts(reason),
            num_output_tokens=struct.pack("<I", 2),
            num_input_tokens=struct.pack("<I", 9),
        ),
        alternatives=0,
    )
    assert delta == Delta("\u00fc", read, 2, (), 9, final=True)


def test_empty_final_response_is_an_end() -> None:
    """Some models send the final flag by itself."""
    assert read_delta(response(final=True), alternatives=0).final


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"text_output": b"\x05\x00\x00\x00ab"},
        {"text_output": texts(b"a"), "finish_reason": texts(b"stop", b"stop")},
        {"text_output": texts(b"a"), "logprobs": texts(b"{")},
        {"text_output": b"\x05\x00"},
        {"text_output": texts(b"a", b"b")},
        {"text_output": texts(b"a"), "num_output_tokens": b"\x01\x00\x00"},
    ],
)
def test_malformed_response_is_cloud_failed(tensors: dict[str, bytes]) -> None:
    """Missing, cut or contradictory tensors."""
    with pytest.raises(CloudFailed):
        read_delta(response(False, **tensors), alternatives=0)


def test_logprobs_round_trip() -> None:
    first = TokenLogprob("b", -1.5, (98,), (TokenAlternative("a", -0.5, (97,)), TokenAlternative("b", -1.5, (98,))))
    half = TokenLogprob("\ufffd", -0.1, (0xC3,), (TokenAlternative("\ufffd", -0.1, (0xC3,)),))
    outside = TokenLogprob("z", -9.0, (122,), (TokenAlternative("a", -0.1, (97,)),))
    tokens = (first, half, outside)
    assert decode_logprobs(encode_logprobs(tokens), alternatives=2) == (
        first,
        half,
        TokenLogprob("z", -9.0, (122,), (TokenAlternative("a", -0.1, (97,)), TokenAlternative("z", -9.0, (122,)))),
    )
    assert decode_logprobs(encode_logprobs(tokens), alternatives=0)[0] == TokenLogprob("b", -1.5, (98,))


def test_logprobs_of_vllm() -> None:
    """vLLM's keys are token ids, and it sends no bytes."""
    document = msgspec.json.encode(
        [
            {
                "42": {"logprob": -0.7, "rank": 2, "decoded_token": " x"},
                "7": {"logprob": -0.6, "rank": 1, "decoded_token": "y"},
            }
        ]
    )
    (token,) = decode_logprobs(document, alternatives=1)
    assert (token.token, token.bytes) == (" x", (32, 120))
    assert [one.token for one in token.top] == ["y"]
    assert decode_logprobs(b"null", alternatives=1) == ()
