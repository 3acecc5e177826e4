"""Conversion of a sequence to the tensors of TensorRT-LLM's models in Triton, and of its responses back. Pure.

Names, types and shapes are those of the configurations that NVIDIA publishes (github.com/NVIDIA/TensorRT-LLM, below
triton_backend/all_models): `inflight_batcher_llm/ensemble`, and `llmapi/tensorrt_llm`, decoupled. Triton refuses inputs
that a model does not name, so only those are sent which a request needs.

    ensemble   text of the new tokens in each response; no finish reason: `length` at the limit, else `stop`
    LLM API    the whole text so far in each response; a finish reason; no numbers of tokens: one for each response
"""

from __future__ import annotations

import struct
from typing import Literal

import msgspec

from causeway_server.router.errors import CloudFailed, UnsupportedFeature

from ..inference import Delta, InferenceRequest
from .messages import ANY_OBJECT, SamplingParameters
from .protocol import ModelInferRequest, ModelInferResponse
from .tensors import add_tensor, add_texts, is_final, raw_outputs, read_number, read_text

TrtllmKind = Literal["trtllm", "trtllm_llmapi"]
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # the beginning of a character whose other bytes are in the next token
_LLMAPI = "sampling_param_"


def check_parameters(kind: TrtllmKind, parameters: SamplingParameters) -> None:
    """Raise UnsupportedFeature for a request whose parameters the kind has no tensors for."""
    absent = [
        ("logprobs", parameters.logprobs is not None),
        ("logit_bias", bool(parameters.logit_bias)),
        ("min_p", bool(parameters.min_p)),
    ]
    if kind == "trtllm_llmapi":
        absent.append(("repetition_penalty", parameters.repetition_penalty != 1.0))
        absent.append(("response_format", bool(parameters.guided.schema)))
    for name, is_asked in absent:
        if is_asked:
            forced = " (or a forced tool call)" if name == "response_format" else ""
            raise UnsupportedFeature(
                f"This model of TensorRT-LLM does not support `{name}`{forced}. Remove the field.", param=name
            )


class EnsembleTensors(msgspec.Struct, frozen=True):
    """The tensors of the ensemble of `inflight_batcher_llm` (`tensors.TensorFormat`)."""

    stop_s: float = 0.0

    def encode(self, request: InferenceRequest, left_s: float, call: str) -> ModelInferRequest:
        parameters, schema = request.parameters, request.parameters.guided.schema
        message = _message(request, call, shape=(1, 1))
        _add_numbers(message, parameters, "", (1, 1))
        add_tensor(message, "max_tokens", "INT32", struct.pack("<i", _limit(parameters)), (1, 1))
        if parameters.repetition_penalty != 1.0:
            add_tensor(message, "repetition_penalty", "FP32", struct.pack("<f", parameters.repetition_penalty), (1, 1))
        if parameters.stops:
            add_texts(message, "stop_words", parameters.stops, (1, len(parameters.stops)))
        if schema:
            guide_type = "json" if schema == ANY_OBJECT else "json_schema"
            add_texts(message, "guided_decoding_guide_type", [guide_type], (1, 1))
            if schema != ANY_OBJECT:
                add_texts(message, "guided_decoding_guide", [schema], (1, 1))
        for name in ("stream", "exclude_input_in_output", "return_num_input_tokens", "return_num_output_tokens"):
            add_tensor(message, name, "BOOL", b"\x01", (1, 1))
        return message

    def reader(self, request: InferenceRequest) -> EnsembleReader:
        return EnsembleReader(_limit(request.parameters))


class EnsembleReader:
    """A reader of one sequence's responses. `limit`: maximum tokens of the answer."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._tokens = 0

    def read(self, response: ModelInferResponse) -> Delta:
        final, raw = is_final(response), raw_outputs(response)
        text = read_text(raw["text_output"]).decode(errors="replace") if "text_output" in raw else ""
        count = read_number(raw.get("num_output_tokens")) if "num_output_tokens" in raw else int("text_output" in raw)
        self._tokens += count
        reason = ("length" if self._tokens >= self._limit else "stop") if final else None
        return Delta(text, reason, count, (), read_number(raw.get("num_input_tokens")), final)


class LlmApiTensors(msgspec.Struct, frozen=True):
    """The tensors of the model `tensorrt_llm` of the LLM API's backend (`tensors.TensorFormat`)."""

    stop_s: float = 0.0

    def encode(self, request: InferenceRequest, left_s: float, call: str) -> ModelInferRequest:
        parameters = request.parameters
        message = _message(request, call, shape=(1,))
        _add_numbers(message, parameters, _LLMAPI, (1,))
        add_tensor(message, f"{_LLMAPI}max_tokens", "INT32", struct.pack("<i", _limit(parameters)), (1,))
        if parameters.stops:
            add_texts(message, f"{_LLMAPI}stop", parameters.stops, (len(parameters.stops),))
        for name in ("streaming", f"{_LLMAPI}exclude_input_from_output", "return_finish_reason"):
            add_tensor(message, name, "BOOL", b"\x01", (1,))
        return message

    def reader(self, request: InferenceRequest) -> LlmApiReader:
        return LlmApiReader()


class LlmApiReader:
    """A reader of one sequence's responses, each of which has the whole text so far."""

    def __init__(self) -> None:
        self._sent = ""

    def read(self, response: ModelInferResponse) -> Delta:
        final, raw = is_final(response), raw_outputs(response)
        if "text_output" not in raw:
            return Delta(final=final)
        text = read_text(raw["text_output"]).decode(errors="replace")
        reason = read_text(raw["finish_reason"]).decode(errors="replace") if raw.get("finish_reason") else "None"
        if reason == "None":
            text = text.rstrip(_UNFINISHED)
        if not text.startswith(self._sent):
            raise CloudFailed(
                "TensorRT-LLM changed text that it had sent before, so the answer cannot be continued.", phase="stream"
            )
        new, self._sent = text[len(self._sent) :], text
        return Delta(new, None if reason == "None" else reason, 1, final=final)


def _message(request: InferenceRequest, call: str, shape: tuple[int, ...]) -> ModelInferRequest:
    if not isinstance(request.prompt, str):
        raise UnsupportedFeature("TensorRT-LLM's models take text, not token ids. Send a string.", param="prompt")
    message = ModelInferRequest(model_name=request.model, id=call)
    add_texts(message, "text_input", [request.prompt], shape)
    return message


def _limit(parameters: SamplingParameters) -> int:
    assert parameters.max_tokens is not None, "A tier always limits its answers."
    return parameters.max_tokens


def _add_numbers(
    message: ModelInferRequest, parameters: SamplingParameters, prefix: str, shape: tuple[int, ...]
) -> None:
    """Add the sampling parameters of both models; those at their defaults are left to the server."""
    is_greedy = parameters.temperature == 0.0  # TensorRT-LLM has no temperature of 0
    top_k = 1 if is_greedy else max(parameters.top_k, 0)
    if top_k:
        add_tensor(message, f"{prefix}top_k", "INT32", struct.pack("<i", top_k), shape)
    floats = {
        "temperature": (1.0 if is_greedy else parameters.temperature, 1.0),
        "top_p": (1.0 if is_greedy else parameters.top_p, 1.0),
        "presence_penalty": (parameters.presence_penalty, 0.0),
        "frequency_penalty": (parameters.frequency_penalty, 0.0),
    }
    for name, (value, default) in floats.items():
        if value != default:
            add_tensor(message, f"{prefix}{name}", "FP32", struct.pack("<f", value), shape)
    if parameters.seed is not None:
        add_tensor(
            message, f"{prefix}seed", "UINT64", struct.pack("<Q", parameters.seed & 0xFFFF_FFFF_FFFF_FFFF), shape
        )
