"""Makes Triton's log readable: without noise, and without texts that may quote a request.

On a machine without a GPU half of Triton's lines complain about that. What a model raises is in its log with the whole
message, and llama.cpp prints a grammar that it cannot parse, which may hold words of the user's message. Of these the
log keeps the exception's class and the source lines. Before the models are ready there is no request to quote.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_NOISE = re.compile(
    r"""
    ^\s*$
    | ^[+|]                                                   # tables of backends, models and options,
    | ^I\d{4}\ .*server\.cc:\d+\]\s*$                        # and their headings
    | CUDA | CudaDriverHelper | NVML | DCGM
    | Collecting\ (CPU|GPU)\ metrics
    | TRITONBACKEND_ModelInstance
    | HandleCancellation\ called\ even\ when\ the\ context   # logged at a client's deadline, though nothing is wrong
    """,
    re.VERBOSE,
)
_HEAD = re.compile(r'^([IWEF])\d{4} [\d:.]+ \d+ (\S+\.(?:cc|h)):\d+\] "?(.*?)"?$')
_LEVEL = {"I": "", "W": "warning: ", "E": "error: ", "F": "fatal: "}
_RAISED = re.compile(r"^(.*?message: (?:[\w.]+(?=:|$))?).*$")  # by a Python model
_EXCEPTION = re.compile(r"^((?:\w+\.)+[A-Z]\w*|\w*(?:Error|Exception|Interrupt|Exit))(?::.*)?$")
_GRAMMAR = re.compile(r"^(.*error parsing grammar).*$")
_FRAME = re.compile(r'^(?:  )+(?:File "[^"]+", line \d+, in \S+|/\S+\(\d+\): \S+)$')


class LogFilter:
    """Filters the lines of one process, in order: a text that may quote a request can have several.

    `is_serving`: whether the process's models have been ready.
    """

    def __init__(self, is_serving: Callable[[], bool]) -> None:
        self._is_serving = is_serving
        self._in_text = False

    def readable(self, line: str) -> str | None:
        """Return `line` without Triton's own time and source position; None for noise and for hidden text."""
        if _NOISE.search(line):
            return None
        head = _HEAD.match(line)
        if head is not None:
            text = f"{_LEVEL[head[1]]}{head[3]}"
            if not self._is_serving():
                return text
            raised = _RAISED.match(text)
            self._in_text = raised is not None
            return text if raised is None else raised[1]
        if not self._is_serving():
            return line
        if line.startswith("Traceback (most recent call last)"):
            self._in_text = False
        for begins in (_EXCEPTION, _GRAMMAR):
            if (match := begins.match(line)) is not None:
                self._in_text = True
                return match[1]
        return line if not self._in_text or _FRAME.match(line) else None
