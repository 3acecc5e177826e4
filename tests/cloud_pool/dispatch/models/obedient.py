"""A model for Triton's stub, as `1/model.py`, that does what the prompt tells this very replica to do.

The prompt is {"mark": text, "<replica>": [order, …]}, an order one of {"say": text}, {"wait": seconds, or null for
ever}, {"raise": text}, {"fail": [code, text]}; a replica that is not listed answers with its name. Any other prompt,
such as a probe's, is answered with one word. `replica.json` beside this file is {"name": …, "journal": path}; the
journal has a line for each event: began, cancelled, ended.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

_REPLICA = json.loads((Path(__file__).parent / "replica.json").read_text())
_POLL_S = 0.005
_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self._journal = os.open(_REPLICA["journal"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            mark, orders = _told(request)
            self._note(mark, "began")
            for order in orders:
                if "raise" in order:
                    self._note(mark, "ended")
                    raise ValueError(order["raise"])
            threading.Thread(target=self._obey, args=(mark, orders, request.get_response_sender()), daemon=True).start()

    def _obey(self, mark: str, orders: list[dict[str, Any]], sender: Any) -> None:
        error = None
        for order in orders:
            if "say" in order:
                sender.send(_response(order["say"], "None"))
            if "wait" in order and self._cancelled(sender, order["wait"]):
                self._note(mark, "cancelled")
                error = pb_utils.TritonError("cancelled", pb_utils.TritonError.CANCELLED)
                break
            if "fail" in order:
                code, text = order["fail"]
                error = pb_utils.TritonError(text, getattr(pb_utils.TritonError, code))
                break
        last = _response("", "stop") if error is None else pb_utils.InferenceResponse(error=error)
        sender.send(last, flags=_FINAL)
        self._note(mark, "ended")

    def _cancelled(self, sender: Any, seconds: float | None) -> bool:
        ends = float("inf") if seconds is None else time.monotonic() + seconds
        while time.monotonic() < ends:
            if sender.is_cancelled():
                return True
            time.sleep(_POLL_S)
        return False

    def _note(self, mark: str, what: str) -> None:
        os.write(self._journal, f"{mark} {what}\n".encode())


def _told(request: Any) -> tuple[str, list[dict[str, Any]]]:
    text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy().reshape(-1)[0].decode()
    if not text.startswith("{"):
        return "-", [{"say": "word"}]
    orders = json.loads(text)
    return orders["mark"], orders.get(_REPLICA["name"], [{"say": _REPLICA["name"]}])


def _response(text: str, reason: str) -> Any:
    tensors = [
        pb_utils.Tensor(name, np.array([value.encode()], dtype=np.object_))
        for name, value in (("text_output", text), ("finish_reason", reason))
    ]
    tensors.append(pb_utils.Tensor("num_input_tokens", np.array([3], dtype=np.uint32)))
    tensors.append(pb_utils.Tensor("num_output_tokens", np.array([1], dtype=np.uint32)))
    return pb_utils.InferenceResponse(output_tensors=tensors)
