"""A model for Triton's stub, as `1/model.py`, whose speed is set by the clock. Its tensors are the product model's.

`bed.json` beside this file is {"journal": path, "speed": path, "peak": path}. The file `peak` gets the most sequences
with a mark that were inside at once, running or waiting. The speed file is {"slots", "prefill_s", "step_s"} and
may change at any moment: it is read ten times a second. Sequences beyond the slots wait in arrival order, as in a
server with continuous batching. While sequences wait, the slot of a cancelled one is free at its next step; a prefill
has several steps too.
"""

from __future__ import annotations

import collections
import heapq
import itertools
import json
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

_BED = json.loads((Path(__file__).parent / "bed.json").read_text())
_MARK = re.compile(r"qz(\d+)qz")
_READ_S = 0.1
_STEP_S = 0.02


class Sequence:
    def __init__(self, sender: Any, tokens: int, ends: float, *, marked: bool) -> None:
        self.marked = marked
        self.sender = sender
        self.left = tokens
        self.ends = ends


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self._journal = os.open(_BED["journal"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._changed = threading.Condition()
        self._waiting: collections.deque[Sequence] = collections.deque()
        self._running: list[tuple[float, int, Sequence]] = []  # by the time of the next token
        self._order = itertools.count()
        self._read_at = self._dropped_at = 0.0
        self._closing = False
        self._inside = self._peak = 0
        self._read_speed(time.monotonic())
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            found = _MARK.search(_text(request, "text_input"))
            os.write(self._journal, f"{found[1] if found else '-'}\n".encode())
            sampling = json.loads(_text(request, "sampling_parameters") or "{}")
            parameters = json.loads(request.parameters() or "{}")
            left_s = parameters.get("causeway_deadline_ms", 120_000) / 1000.0
            ends = time.monotonic() + left_s
            sender, tokens = request.get_response_sender(), int(sampling["max_tokens"])
            sequence = Sequence(sender, tokens, ends, marked=found is not None)
            with self._changed:
                self._waiting.append(sequence)
                self._count(sequence.marked)
                self._changed.notify()

    def finalize(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _count(self, more: int) -> None:
        with self._changed:
            self._inside += more
            if self._inside > self._peak:
                self._peak = self._inside
                Path(_BED["peak"]).write_text(str(self._inside))

    def _run(self) -> None:
        while True:
            with self._changed:
                now = time.monotonic()
                self._read_speed(now)
                self._drop_cancelled(now)
                self._admit(now)
                if self._closing:
                    return
                if not self._running or self._running[0][0] > now:
                    until = self._running[0][0] - now if self._running else _READ_S
                    self._changed.wait(min(until, _STEP_S if self._waiting else _READ_S))
                    continue
                _, _, sequence = heapq.heappop(self._running)
            self._token(sequence, now)

    def _read_speed(self, now: float) -> None:
        if now - self._read_at >= _READ_S:
            speed = json.loads(Path(_BED["speed"]).read_text())
            self._slots, self._prefill_s, self._step_s = speed["slots"], speed["prefill_s"], speed["step_s"]
            self._read_at = now

    def _drop_cancelled(self, now: float) -> None:
        """Free the slots of cancelled and overdue sequences while others wait."""
        if self._waiting and len(self._running) >= self._slots and now - self._dropped_at >= _STEP_S:
            self._dropped_at = now
            self._running = [entry for entry in self._running if not self._is_over(entry[2], now)]
            heapq.heapify(self._running)

    def _admit(self, now: float) -> None:
        while self._waiting and len(self._running) < self._slots:
            sequence = self._waiting.popleft()
            if not self._is_over(sequence, now):
                heapq.heappush(self._running, (now + self._prefill_s, next(self._order), sequence))

    def _token(self, sequence: Sequence, now: float) -> None:
        if self._is_over(sequence, now):
            return
        sequence.left -= 1
        last = sequence.left <= 0
        if last:
            self._count(-sequence.marked)
        sequence.sender.send(_response(last), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if last else 0)
        if not last:
            with self._changed:
                heapq.heappush(self._running, (now + self._step_s, next(self._order), sequence))

    def _is_over(self, sequence: Sequence, now: float) -> bool:
        """Tell whether the sequence was cancelled or is out of time; if so, end it."""
        cancelled = sequence.sender.is_cancelled()
        if not cancelled and now < sequence.ends:
            return False
        self._count(-sequence.marked)
        code, message = ("CANCELLED", "cancelled") if cancelled else ("UNAVAILABLE", "deadline_exceeded: out of time")
        fault = pb_utils.TritonError(message, getattr(pb_utils.TritonError, code))
        sequence.sender.send(
            pb_utils.InferenceResponse(error=fault), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        )
        return True


def _response(last: bool) -> Any:
    texts = {"text_output": b" word", "finish_reason": b"length" if last else b"None"}
    tensors = [pb_utils.Tensor(name, np.array([text], dtype=np.object_)) for name, text in texts.items()]
    tensors.append(pb_utils.Tensor("num_input_tokens", np.array([10 if last else 0], dtype=np.uint32)))
    tensors.append(pb_utils.Tensor("num_output_tokens", np.array([1], dtype=np.uint32)))
    return pb_utils.InferenceResponse(output_tensors=tensors)


def _text(request: Any, name: str) -> str:
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return "" if tensor is None else tensor.as_numpy().reshape(-1)[0].decode()
