"""The Python backend's language model, which converts tensors for cloud_pool.triton_server.model_runtime.

It runs in the Python backend's stub process, in Triton's environment (numpy < 2), where our packages are importable.
`model.json` beside this file is an EngineOptions.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import triton_python_backend_utils as pb_utils

from causeway_server.cloud_pool.triton_server.model_runtime import (
    ModelRequest,
    ModelResponse,
    ModelRuntime,
    RequestedOutputs,
)
from causeway_server.cloud_pool.upstreams.triton.messages import decode_parameters, encode_logprobs
from causeway_server.models.llama_cpp.engine import Engine
from causeway_server.models.llama_cpp.protocol import Emit, EngineOptions, EngineStats, OnFailure
from causeway_server.router.errors import CausewayError, ClientGone, InvalidRequest

GAUGES = {
    "generated": "tokens of the sequences that have ended, including cancelled ones",
    "running": "sequences in the decode batch",
    "waiting": "sequences that wait for a slot in the decode batch",
    "kv_used": "tokens in the KV cache",
    "kv_total": "capacity of the KV cache in tokens",
    "steps": "decode steps so far",
    "tokens_per_s": "tokens per second of all sequences, over the last second of work",
    "rss_bytes": "resident memory of the model's process in bytes",
}


class Parameters(msgspec.Struct, frozen=True):
    """The request parameters that the model reads."""

    causeway_deadline_ms: int | None = None
    causeway_call: str = ""
    causeway_caller: str = ""


class EmbeddingRequest(msgspec.Struct, frozen=True):
    input: str | tuple[int, ...]


class Gauges:
    """Metrics of the engine on Triton's /metrics, as causeway_engine_<name>{model=…}."""

    def __init__(self, model: str) -> None:
        # The families must live as long as their metrics.
        self._families = {
            name: pb_utils.MetricFamily(f"causeway_engine_{name}", text, kind=pb_utils.MetricFamily.GAUGE)
            for name, text in GAUGES.items()
        }
        self._metrics = {name: family.Metric(labels={"model": model}) for name, family in self._families.items()}
        self._last: dict[str, float] = {}

    def set(self, stats: EngineStats) -> None:
        for name, metric in self._metrics.items():
            value = float(getattr(stats, name))
            if self._last.get(name) != value:
                self._last[name] = value
                metric.set(value)


class Sender:
    """A model_runtime.Responder over Triton's response sender."""

    def __init__(self, sender: Any, requested: RequestedOutputs) -> None:
        self._sender = sender
        self._requested = requested

    def send(self, response: ModelResponse, *, last: bool) -> None:
        tensors = pb_utils.InferenceResponse(output_tensors=tensors_of(response, self._requested))
        self._sender.send(tensors, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if last else 0)

    def fail(self, error: CausewayError) -> None:
        # The text begins with the code: an error inside a stream carries nothing but text.
        fault = pb_utils.TritonError(f"{error.code}: {error.message}", triton_code(error))
        response = pb_utils.InferenceResponse(error=fault)
        self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def is_cancelled(self) -> bool:
        return bool(self._sender.is_cancelled())


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        folder = Path(args["model_repository"]) / args["model_version"]
        options = msgspec.json.decode((folder / "model.json").read_bytes(), type=EngineOptions)
        gauges = Gauges(args["model_name"])

        def start(emit: Emit, on_failure: OnFailure) -> Engine:
            engine = Engine(options, emit, on_failure)
            engine.start()
            return engine

        # End the process: the gateway reloads a model whose process died; one that fails every call looks healthy.
        self._runtime = ModelRuntime(start, report=gauges.set, broken=lambda: os._exit(70))

    def execute(self, requests: list[Any]) -> None:
        """Submit the requests and return. A decoupled model sends its responses from the runtime's own thread."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                call_name = text_of(request, "cancel")
                if call_name is not None:
                    self._runtime.cancel(call_name)
                    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                    continue
                model_request = model_request_of(request)
            except CausewayError as error:
                Sender(sender, RequestedOutputs()).fail(error)
                continue
            self._runtime.submit(model_request, Sender(sender, model_request.outputs))

    def finalize(self) -> None:
        self._runtime.close()


def model_request_of(request: Any) -> ModelRequest:
    """Parse a request. Raises InvalidRequest."""
    parameters = msgspec.json.decode(request.parameters() or "{}", type=Parameters)
    deadline_s = None if parameters.causeway_deadline_ms is None else parameters.causeway_deadline_ms / 1000.0
    embedding = text_of(request, "embedding_request")
    if embedding is not None:
        try:
            content = msgspec.json.decode(embedding, type=EmbeddingRequest).input
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"`embedding_request`: {error}") from error
        is_text = isinstance(content, str)
        return ModelRequest(
            prompt=content if is_text else "",
            token_ids=() if is_text else content,
            parameters=decode_parameters("{}"),
            embed=True,
            outputs=outputs_of(request),
            deadline_s=deadline_s,
            call_name=parameters.causeway_call,
            caller=parameters.causeway_caller,
        )
    prompt, token_ids = text_of(request, "text_input"), token_ids_of(request)
    if prompt is None and not token_ids:
        raise InvalidRequest("`text_input` is missing.")
    stream = flag_of(request, "stream") or False
    without_input = flag_of(request, "exclude_input_in_output")
    return ModelRequest(
        prompt=prompt or "",
        token_ids=token_ids,
        parameters=decode_parameters(text_of(request, "sampling_parameters") or plain_parameters(request)),
        stream=stream,
        with_input=not (stream if without_input is None else without_input),
        outputs=outputs_of(request),
        deadline_s=deadline_s,
        call_name=parameters.causeway_call,
    )


def plain_parameters(request: Any) -> bytes:
    """Read the sampling parameters from the request's parameters, as the vLLM backend does (POST …/generate)."""
    plain = msgspec.json.decode(request.parameters() or "{}", type=dict[str, Any])
    return msgspec.json.encode(
        {name: value for name, value in plain.items() if name not in Parameters.__struct_fields__}
    )


def outputs_of(request: Any) -> RequestedOutputs:
    return RequestedOutputs(
        **{name: bool(flag_of(request, f"return_{name}")) for name in RequestedOutputs.__struct_fields__}
    )


def text_of(request: Any, name: str) -> str | None:
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        return None
    value = tensor.as_numpy().reshape(-1)[0]
    try:
        return value.decode("utf-8") if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{name} is not UTF-8: {error}") from error


def token_ids_of(request: Any) -> tuple[int, ...]:
    tensor = pb_utils.get_input_tensor_by_name(request, "token_ids")
    return () if tensor is None else tuple(tensor.as_numpy().reshape(-1).tolist())


def flag_of(request: Any, name: str) -> bool | None:
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else bool(tensor.as_numpy().reshape(-1)[0])


def tensors_of(response: ModelResponse, requested: RequestedOutputs) -> list[Any]:
    """Return text_output and the requested optional outputs: shape [n] each, num_input_tokens [1]."""
    texts = response.texts
    if response.embedding:
        texts = (msgspec.json.encode(response.embedding).decode(),)
    tensors = [bytes_tensor("text_output", [text.encode() for text in texts])]
    if requested.finish_reason:
        tensors.append(bytes_tensor("finish_reason", [str(reason).encode() for reason in response.finish_reasons]))
    if requested.cumulative_logprob:
        tensors.append(pb_utils.Tensor("cumulative_logprob", np.array(response.cumulative_logprobs, dtype=np.float32)))
    if requested.logprobs:
        tensors.append(bytes_tensor("logprobs", [encode_logprobs(tokens) for tokens in response.logprobs]))
    if requested.num_input_tokens:
        tensors.append(pb_utils.Tensor("num_input_tokens", np.array([response.input_tokens], dtype=np.uint32)))
    if requested.num_output_tokens:
        tensors.append(pb_utils.Tensor("num_output_tokens", np.array(response.new_tokens, dtype=np.uint32)))
    return tensors


def bytes_tensor(name: str, values: list[bytes]) -> Any:
    return pb_utils.Tensor(name, np.array(values, dtype=np.object_))


def triton_code(error: CausewayError) -> Any:
    if isinstance(error, ClientGone):
        return pb_utils.TritonError.CANCELLED
    if error.status == 404:
        return pb_utils.TritonError.NOT_FOUND
    if error.status in (429, 503):
        return pb_utils.TritonError.UNAVAILABLE
    return pb_utils.TritonError.INVALID_ARG if 400 <= error.status < 500 else pb_utils.TritonError.INTERNAL
