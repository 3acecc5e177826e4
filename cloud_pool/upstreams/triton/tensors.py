"""Conversion of a sequence to the tensors of Triton's vLLM backend, and of its responses back. Pure.

BYTES tensors hold a 4-byte little-endian length and the bytes for each element, BOOL one byte, numbers are
little-endian (github.com/kserve/kserve, open inference protocol, "raw tensor contents").
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache
from typing import Protocol

import msgspec
from google.protobuf.message import DecodeError

from causeway_server.router.errors import CloudFailed

from ..inference import Delta, InferenceRequest
from .messages import decode_logprobs, encode_parameters
from .protocol import ModelInferRequest, ModelInferResponse, ModelStreamInferResponse

STOP_S = 5.0
"""Time that a model may take to stop."""
_LENGTH = struct.Struct("<I")
_TRUE = b"\x01"
_FINAL = "triton_final_response"


class DeltaReader(Protocol):
    """A reader of one sequence's responses."""

    def read(self, response: ModelInferResponse, /) -> Delta:
        """Decode the next response. Raises CloudFailed for a missing or malformed tensor."""
        ...


class TensorFormat(Protocol):
    """The tensors of one kind of model. `stop_s`: time for a call to stop when asked; 0: it cannot be asked."""

    @property
    def stop_s(self) -> float: ...

    def encode(self, request: InferenceRequest, left_s: float, call: str) -> ModelInferRequest:
        """Encode a request; `left_s` and `call` are as for `to_infer_request`."""
        ...

    def reader(self, request: InferenceRequest) -> DeltaReader: ...


class VllmTensors(msgspec.Struct, frozen=True):
    """The tensors of Triton's vLLM backend and of our own models (`TensorFormat`)."""

    stop_s: float = STOP_S

    def encode(self, request: InferenceRequest, left_s: float, call: str) -> ModelInferRequest:
        return to_infer_request(request, left_s, call)

    def reader(self, request: InferenceRequest) -> DeltaReader:
        return VllmReader(request.parameters.logprobs or 0)


class VllmReader(msgspec.Struct, frozen=True):
    """A reader of responses with at most `alternatives` per token (`DeltaReader`)."""

    alternatives: int

    def read(self, response: ModelInferResponse) -> Delta:
        return read_delta(response, self.alternatives)


def to_infer_request(request: InferenceRequest, left_s: float, call: str = "") -> ModelInferRequest:
    """Encode a request. `left_s`: the engine's time from now; `call`: name by which our model can be asked to stop."""
    message = ModelInferRequest(model_name=request.model, id=request.request_id)
    if request.part is not None:
        _add_text(message, "part", request.part.data)
        _add_text(message, "job", msgspec.json.encode(request.part.job))
    elif request.embed:
        _add_text(message, "embedding_request", msgspec.json.encode({"input": request.prompt}))
        add_tensor(message, "return_num_input_tokens", "BOOL", _TRUE)
    else:
        _add_generation(message, request)
    # Read by our own model; a stock backend ignores them and is stopped by the call's deadline.
    message.parameters["causeway_deadline_ms"].int64_param = max(1, round(1000.0 * left_s))
    message.parameters["causeway_call"].string_param = call
    if request.caller:
        message.parameters["causeway_caller"].string_param = request.caller
    return message


def _add_generation(message: ModelInferRequest, request: InferenceRequest) -> None:
    if isinstance(request.prompt, str):
        _add_text(message, "text_input", request.prompt.encode())
    else:
        count = len(request.prompt)
        add_tensor(message, "token_ids", "INT32", struct.pack(f"<{count}i", *request.prompt), (count,))
    if request.images:
        add_texts(message, "image", request.images, (len(request.images),))
    _add_text(message, "sampling_parameters", encode_parameters(request.parameters))
    message.MergeFromString(_flags())
    if request.parameters.logprobs is not None:
        add_tensor(message, "return_logprobs", "BOOL", _TRUE)


@cache
def _flags() -> bytes:
    """Return the tensors that all requests have, encoded."""
    message = ModelInferRequest()
    for name in ("stream", "exclude_input_in_output", "return_finish_reason"):
        add_tensor(message, name, "BOOL", _TRUE)
    for name in ("return_num_input_tokens", "return_num_output_tokens"):
        add_tensor(message, name, "BOOL", _TRUE)
    encoded: bytes = message.SerializeToString()
    return encoded


def to_cancel_request(model: str, call: str) -> ModelInferRequest:
    """Encode the request that makes our own model stop a call; other models refuse the unknown tensor."""
    message = ModelInferRequest(model_name=model)
    _add_text(message, "cancel", call.encode())
    return message


def read_response(data: bytes) -> ModelStreamInferResponse:
    """Decode a message of a call. Raises CloudFailed."""
    try:
        return ModelStreamInferResponse.FromString(data)
    except DecodeError as error:
        raise CloudFailed(f"Triton's response cannot be decoded: {error}", phase="stream") from error


def read_delta(response: ModelInferResponse, alternatives: int) -> Delta:
    """Decode a response with at most `alternatives` per token. Raises CloudFailed for a missing or malformed tensor."""
    final, raw = is_final(response), raw_outputs(response)
    if "text_output" not in raw:
        if final:
            return Delta(final=True)
        raise CloudFailed(
            "Triton's response has no text_output: the model generates no text, or its environment has numpy 2.",
            phase="stream",
        )
    try:
        reason = read_text(raw["finish_reason"]) if raw.get("finish_reason") else b""
        return Delta(
            read_text(raw["text_output"]).decode(errors="replace"),
            None if reason in (b"None", b"") else reason.decode(errors="replace"),
            read_number(raw.get("num_output_tokens")),
            decode_logprobs(read_text(raw["logprobs"]), alternatives) if raw.get("logprobs") else (),
            read_number(raw.get("num_input_tokens")),
            final,
        )
    except (struct.error, msgspec.DecodeError) as error:
        raise CloudFailed(f"Triton's response cannot be decoded: {error}", phase="stream") from error


def is_final(response: ModelInferResponse) -> bool:
    """Return whether the response is the call's last one."""
    return _FINAL in response.parameters and bool(response.parameters[_FINAL].bool_param)


def raw_outputs(response: ModelInferResponse) -> dict[str, bytes]:
    """Return the bytes of each output by name."""
    return dict(zip([output.name for output in response.outputs], response.raw_output_contents, strict=False))


def add_texts(message: ModelInferRequest, name: str, texts: Sequence[str], shape: tuple[int, ...] = (1,)) -> None:
    encoded = [text.encode() for text in texts]
    add_tensor(message, name, "BYTES", b"".join(_LENGTH.pack(len(text)) + text for text in encoded), shape)


def add_tensor(message: ModelInferRequest, name: str, datatype: str, raw: bytes, shape: tuple[int, ...] = (1,)) -> None:
    message.inputs.add(name=name, datatype=datatype, shape=shape)
    message.raw_input_contents.append(raw)


def _add_text(message: ModelInferRequest, name: str, text: bytes) -> None:
    add_tensor(message, name, "BYTES", _LENGTH.pack(len(text)) + text)


def read_text(raw: bytes) -> bytes:
    """Return the single text of a tensor. Raises struct.error."""
    (length,) = _LENGTH.unpack_from(raw)
    if length != len(raw) - _LENGTH.size:
        raise struct.error("A tensor does not hold the text of one sequence.")
    return raw[_LENGTH.size :]


def read_number(raw: bytes | None) -> int:
    """Return the single number of a tensor, 0 if there is none. Raises struct.error."""
    return _LENGTH.unpack(raw)[0] if raw else 0
