"""A stand-in for TensorRT-LLM's models and a vision model of the vLLM backend, for Triton's stub, as `1/model.py`.

It has the tensors of the model whose configuration lies beside it. It answers with the words of its prompt, one token
each, up to the limit of tokens; the prompt `parameters` is answered with the inputs that came, as JSON in one token,
and the prompt `wait` with one word, after which it waits until it is cancelled.
"""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
_POLL_S = 0.005


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        self._inputs = [one["name"] for one in config["input"]]
        self._is_ensemble = config["name"] == "ensemble"
        self._sees = config["name"] == "vision"

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            found = {name: pb_utils.get_input_tensor_by_name(request, name) for name in self._inputs}
            given = {name: _plain(tensor.as_numpy()) for name, tensor in found.items() if tensor is not None}
            threading.Thread(target=self._answer, args=(given, request.get_response_sender()), daemon=True).start()

    def _answer(self, given: dict[str, list[Any]], sender: Any) -> None:
        (prompt,) = given["text_input"]
        if self._sees:
            sender.send(_seen(given), flags=_FINAL)
            return
        (limit,) = given["max_tokens" if self._is_ensemble else "sampling_param_max_tokens"]
        if not given["stream" if self._is_ensemble else "streaming"][0]:
            raise ValueError("The stand-in only streams.")
        tokens = [json.dumps(given)] if prompt.endswith("parameters") else [f"{word} " for word in prompt.split()]
        tokens = tokens[:limit] or [""]
        for at, token in enumerate(tokens, 1):
            is_last = at == len(tokens)
            reason = ("length" if at == limit else "stop") if is_last else "None"
            text = token if self._is_ensemble else "".join(tokens[:at])
            sender.send(self._response(text, reason, len(prompt.split())), flags=_FINAL if is_last else 0)
            while prompt.endswith("wait") and not is_last:
                if sender.is_cancelled():
                    sender.send(flags=_FINAL)
                    return
                time.sleep(_POLL_S)

    def _response(self, text: str, reason: str, input_tokens: int) -> Any:
        if self._is_ensemble:
            return pb_utils.InferenceResponse(
                [
                    pb_utils.Tensor("text_output", np.array([[text]], dtype=np.object_)),
                    pb_utils.Tensor("num_input_tokens", np.array([[input_tokens]], dtype=np.int32)),
                    pb_utils.Tensor("num_output_tokens", np.array([[1]], dtype=np.int32)),
                ]
            )
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("text_output", np.array([text], dtype=np.object_)),
                pb_utils.Tensor("finish_reason", np.array([reason], dtype=np.object_)),
            ]
        )


def _seen(given: dict[str, list[Any]]) -> Any:
    """Return what came, as the answer in one token."""
    return pb_utils.InferenceResponse(
        [
            pb_utils.Tensor("text_output", np.array([json.dumps(given)], dtype=np.object_)),
            pb_utils.Tensor("finish_reason", np.array(["stop"], dtype=np.object_)),
            pb_utils.Tensor("num_input_tokens", np.array([7], dtype=np.uint32)),
            pb_utils.Tensor("num_output_tokens", np.array([1], dtype=np.uint32)),
        ]
    )


def _plain(values: Any) -> list[Any]:
    flat = values.reshape(-1).tolist()
    return [value.decode() if isinstance(value, bytes) else value for value in flat]
