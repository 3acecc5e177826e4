"""The Python backend's encoder model: tensors for `encoder_runtime`, with `model.json` as its EncoderOptions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import triton_python_backend_utils as pb_utils

from causeway_server.cloud_pool.triton_server.encoder_runtime import EncoderOptions, EncoderRuntime, PartRequest
from causeway_server.cloud_pool.upstreams.triton.messages import PartReply, read_job
from causeway_server.router.errors import CausewayError, InvalidRequest

GAUGES = {
    "running": "parts that are being read, or wait to be read",
    "requests": "parts so far",
    "process_starts": "decoder and encoder processes started so far",
}


class EncoderParameters(msgspec.Struct, frozen=True):
    """The request parameters that the encoder reads."""

    causeway_deadline_ms: int | None = None
    causeway_call: str = ""


class EncoderGauges:
    """Metrics of the encoder on Triton's /metrics, as causeway_encoder_<name>{model=…}."""

    def __init__(self, model: str) -> None:
        # The families must live as long as their metrics.
        self._families = [
            pb_utils.MetricFamily(f"causeway_encoder_{name}", text, kind=pb_utils.MetricFamily.GAUGE)
            for name, text in GAUGES.items()
        ]
        self._metrics = [family.Metric(labels={"model": model}) for family in self._families]

    def set(self, *values: int) -> None:
        for metric, value in zip(self._metrics, values, strict=True):
            metric.set(float(value))


class PartSender:
    """A model_runtime.Responder over Triton's response sender."""

    def __init__(self, sender: Any) -> None:
        self._sender = sender

    def send(self, reply: PartReply, *, last: bool) -> None:
        tensor = pb_utils.Tensor("text_output", np.array([msgspec.json.encode(reply)], dtype=np.object_))
        response = pb_utils.InferenceResponse(output_tensors=[tensor])
        self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if last else 0)

    def fail(self, error: CausewayError) -> None:
        # The text begins with the code: an error inside a stream carries nothing but text.
        response = pb_utils.InferenceResponse(error=pb_utils.TritonError(f"{error.code}: {error.message}"))
        self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def is_cancelled(self) -> bool:
        return bool(self._sender.is_cancelled())


class EncoderModel:
    def initialize(self, args: dict[str, str]) -> None:
        folder = Path(args["model_repository"]) / args["model_version"]
        options = msgspec.json.decode((folder / "model.json").read_bytes(), type=EncoderOptions)
        self._gauges = EncoderGauges(args["model_name"])
        self._runtime = EncoderRuntime(options, self._gauges.set)

    def execute(self, requests: list[Any]) -> None:
        """Submit the requests and return. A decoupled model sends its responses from the runtime's own thread."""
        for request in requests:
            sender = request.get_response_sender()
            call_name = bytes_of(request, "cancel")
            if call_name is not None:
                self._runtime.cancel(call_name.decode(errors="replace"))
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                continue
            try:
                part_request = part_request_of(request)
            except InvalidRequest as error:
                PartSender(sender).fail(error)
                continue
            self._runtime.submit(part_request, PartSender(sender))

    def finalize(self) -> None:
        self._runtime.close()


TritonPythonModel = EncoderModel
"""The class name that the Python backend looks for."""


def part_request_of(request: Any) -> PartRequest:
    """Parse a request. Raises InvalidRequest."""
    parameters = msgspec.json.decode(request.parameters() or "{}", type=EncoderParameters)
    deadline_s = None if parameters.causeway_deadline_ms is None else parameters.causeway_deadline_ms / 1000.0
    job, part = bytes_of(request, "job"), bytes_of(request, "part")
    if job is None or part is None:
        if bytes_of(request, "text_input") is not None:
            return PartRequest(None)
        raise InvalidRequest("The tensor `part` or `job` is missing.")
    try:
        return PartRequest(read_job(job), part, deadline_s, parameters.causeway_call)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"`job`: {error}") from error


def bytes_of(request: Any, name: str) -> bytes | None:
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else bytes(tensor.as_numpy().reshape(-1)[0])
