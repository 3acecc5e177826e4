"""Conversion of a sequence to the tensors of Triton's vLLM backend, and of its responses back. Pure.

BYTES tensors hold a 4-byte little-endian length and the bytes for each element, BOOL one byte, numbers are
little-endian (github.com/kserve/kserve, open inference protocol, "raw tensor contents").
"""

from __future__ import annotations

import struct

import msgspec
from tritonclient.grpc import service_pb2

from causeway_server.router.errors import CloudFailed

from ..inference import Delta, InferenceRequest
from .messages import decode_logprobs, encode_parameters

_LENGTH = struct.Struct("<I")
_TRUE = b"\x01"
_FINAL = "triton_final_response"


def to_infer_request(request: InferenceRequest, left_s: float, call: str = "") -> service_pb2.ModelInferRequest:
    """Encode a request.

    Args:
        request: Request to encode.
        left_s: Time that the engine has, from now.
        call: Name by which our own model can be asked to stop.
    """
    message = service_pb2.ModelInferRequest(model_name=request.model, id=request.request_id)
    if request.part is not None:
        _add_text(message, "part", request.part.data)
        _add_text(message, "job", msgspec.json.encode(request.part.job))
    elif request.embed:
        _add_text(message, "embedding_request", msgspec.json.encode({"input": request.prompt}))
        _add(message, "return_num_input_tokens", "BOOL", _TRUE)
    else:
        _add_generation(message, request)
    # Read by our own model; a stock backend ignores them and is stopped by the call's deadline.
    message.parameters["causeway_deadline_ms"].int64_param = max(1, round(1000.0 * left_s))
    message.parameters["causeway_call"].string_param = call
    if request.caller:
        message.parameters["causeway_caller"].string_param = request.caller
    return message


def _add_generation(message: service_pb2.ModelInferRequest, request: InferenceRequest) -> None:
    if isinstance(request.prompt, str):
        _add_text(message, "text_input", request.prompt.encode())
    else:
        _add(
            message, "token_ids", "INT32", struct.pack(f"<{len(request.prompt)}i", *request.prompt), len(request.prompt)
        )
    _add_text(message, "sampling_parameters", encode_parameters(request.parameters))
    flags = ["stream", "exclude_input_in_output", "return_finish_reason", "return_num_input_tokens"]
    flags.append("return_num_output_tokens")
    if request.parameters.logprobs is not None:
        flags.append("return_logprobs")
    for name in flags:
        _add(message, name, "BOOL", _TRUE)


def to_cancel_request(model: str, call: str) -> service_pb2.ModelInferRequest:
    """Encode the request that makes our own model stop a call; other models refuse the unknown tensor."""
    message = service_pb2.ModelInferRequest(model_name=model)
    _add_text(message, "cancel", call.encode())
    return message


def read_delta(response: service_pb2.ModelInferResponse, alternatives: int) -> Delta:
    """Decode a response with at most `alternatives` per token. Raises CloudFailed for a missing or malformed tensor."""
    raw = dict(zip([output.name for output in response.outputs], response.raw_output_contents, strict=False))
    final = _FINAL in response.parameters and response.parameters[_FINAL].bool_param
    if "text_output" not in raw:
        if final:
            return Delta(final=True)
        raise CloudFailed(
            "Triton's response has no text_output: the model generates no text, or its environment has numpy 2.",
            phase="stream",
        )
    try:
        reason = _text(raw["finish_reason"]) if raw.get("finish_reason") else b""
        return Delta(
            _text(raw["text_output"]).decode(errors="replace"),
            None if reason in (b"None", b"") else reason.decode(errors="replace"),
            _number(raw.get("num_output_tokens")),
            decode_logprobs(_text(raw["logprobs"]), alternatives) if raw.get("logprobs") else (),
            _number(raw.get("num_input_tokens")),
            final,
        )
    except (struct.error, msgspec.DecodeError) as error:
        raise CloudFailed(f"Triton's response cannot be decoded: {error}", phase="stream") from error


def _add_text(message: service_pb2.ModelInferRequest, name: str, text: bytes) -> None:
    _add(message, name, "BYTES", _LENGTH.pack(len(text)) + text)


def _add(message: service_pb2.ModelInferRequest, name: str, datatype: str, raw: bytes, length: int = 1) -> None:
    message.inputs.add(name=name, datatype=datatype, shape=(length,))
    message.raw_input_contents.append(raw)


def _text(raw: bytes) -> bytes:
    """Return the single text of a tensor. Raises struct.error."""
    (length,) = _LENGTH.unpack_from(raw)
    if length != len(raw) - _LENGTH.size:
        raise struct.error("A tensor does not hold the text of one sequence.")
    return raw[_LENGTH.size :]


def _number(raw: bytes | None) -> int:
    """Return the single number of a tensor, 0 if there is none. Raises struct.error."""
    return _LENGTH.unpack(raw)[0] if raw else 0
