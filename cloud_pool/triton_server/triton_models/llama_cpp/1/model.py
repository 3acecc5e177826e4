"""Triton's view of cloud_pool.triton_server.model_runtime: tensors in, tensors out.

`model.json` beside this file is an EngineOptions.

This runs in the Python backend's stub, in Triton's environment (numpy < 2), where the packages of Causeway are
importable.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import triton_python_backend_utils as pb_utils

from cloud_pool.triton_server.model_runtime import (
    Emit,
    ModelRequest,
    ModelResponse,
    ModelRuntime,
    OnFailure,
    RequestedOutputs,
)
from cloud_pool.upstreams.triton import logprobs
from cloud_pool.upstreams.triton.sampling_parameters import decode
from models.llama_cpp.engine import Engine
from models.llama_cpp.protocol import EngineOptions, EngineStats
from router.errors import CausewayError, ClientGone, InvalidRequest

GAUGES = {
    "running": "sequences in the decode batch",
    "waiting": "sequences that wait for a place in it",
    "kv_used": "tokens in the KV cache",
    "kv_total": "tokens that the KV cache holds",
    "steps": "decode steps so far",
    "tokens_per_s": "tokens a second, all sequences, over the last second of work",
    "rss_bytes": "resident memory of the model's process",
}


class Parameters(msgspec.Struct, frozen=True):
    """Of the request's own parameters, those that we read."""

    causeway_deadline_ms: int | None = None
    causeway_call: str = ""


class EmbeddingRequest(msgspec.Struct, frozen=True):
    input: str


class Gauges:
    """The engine's figures on Triton's /metrics, as causeway_engine_<name>{model=…}."""

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
    """generation.Responder over Triton's response sender."""

    def __init__(self, sender: Any, wants: RequestedOutputs) -> None:
        self._sender = sender
        self._wants = wants

    def send(self, outputs: ModelResponse, *, last: bool) -> None:
        response = pb_utils.InferenceResponse(output_tensors=tensors_of(outputs, self._wants))
        self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if last else 0)

    def fail(self, error: CausewayError) -> None:
        # The code leads the text: errors inside a stream carry nothing else.
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

        # A process that is gone is what the gateway repairs; one that stays and fails every call looks healthy.
        self._generator = ModelRuntime(start, report=gauges.set, broken=lambda: os._exit(70))

    def execute(self, requests: list[Any]) -> None:
        """Decoupled: the answers come from the generator's own thread, this one takes the next requests."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                call = text_of(request, "cancel")
                if call is not None:
                    self._generator.cancel(call)
                    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                    continue
                ask = ask_of(request)
            except CausewayError as error:
                Sender(sender, RequestedOutputs()).fail(error)
                continue
            self._generator.submit(ask, Sender(sender, ask.wants))

    def finalize(self) -> None:
        self._generator.close()


def ask_of(request: Any) -> ModelRequest:
    """Raises InvalidRequest."""
    own = msgspec.json.decode(request.parameters() or "{}", type=Parameters)
    deadline_s = None if own.causeway_deadline_ms is None else own.causeway_deadline_ms / 1000.0
    embedding = text_of(request, "embedding_request")
    if embedding is not None:
        try:
            prompt = msgspec.json.decode(embedding, type=EmbeddingRequest).input
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"embedding_request: {error}") from error
        return ModelRequest(
            prompt=prompt, parameters=decode("{}"), embed=True, deadline_s=deadline_s, wants=wants_of(request)
        )
    prompt = text_of(request, "text_input")
    if prompt is None:
        raise InvalidRequest("text_input is missing")
    stream = flag_of(request, "stream") or False
    without_input = flag_of(request, "exclude_input_in_output")
    return ModelRequest(
        prompt=prompt,
        parameters=decode(text_of(request, "sampling_parameters") or plain_parameters(request)),
        stream=stream,
        with_input=not (stream if without_input is None else without_input),
        wants=wants_of(request),
        deadline_s=deadline_s,
        call=own.causeway_call,
    )


def plain_parameters(request: Any) -> bytes:
    """Where there is no tensor the request's own parameters count, as in the vLLM backend (POST …/generate)."""
    found = msgspec.json.decode(request.parameters() or "{}", type=dict[str, Any])
    return msgspec.json.encode(
        {name: value for name, value in found.items() if name not in Parameters.__struct_fields__}
    )


def wants_of(request: Any) -> RequestedOutputs:
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


def flag_of(request: Any, name: str) -> bool | None:
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else bool(tensor.as_numpy().reshape(-1)[0])


def tensors_of(outputs: ModelResponse, wants: RequestedOutputs) -> list[Any]:
    """text_output and what was asked for besides; [n] each, num_input_tokens [1]."""
    texts = outputs.texts
    if outputs.embedding:
        texts = (msgspec.json.encode(outputs.embedding).decode(),)
    made = [bytes_tensor("text_output", [text.encode() for text in texts])]
    if wants.finish_reason:
        made.append(bytes_tensor("finish_reason", [str(reason).encode() for reason in outputs.finish_reasons]))
    if wants.cumulative_logprob:
        made.append(pb_utils.Tensor("cumulative_logprob", np.array(outputs.cumulative_logprobs, dtype=np.float32)))
    if wants.logprobs:
        made.append(bytes_tensor("logprobs", [logprobs.encode(tokens) for tokens in outputs.logprobs]))
    if wants.num_input_tokens:
        made.append(pb_utils.Tensor("num_input_tokens", np.array([outputs.input_tokens], dtype=np.uint32)))
    if wants.num_output_tokens:
        made.append(pb_utils.Tensor("num_output_tokens", np.array(outputs.new_tokens, dtype=np.uint32)))
    return made


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
