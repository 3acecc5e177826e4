"""Removes noise from Triton's log: on a machine without a GPU half of its lines complain about that."""

from __future__ import annotations

import re

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


def readable_line(line: str) -> str | None:
    """Return `line` without Triton's own time and source position; None for noise."""
    if _NOISE.search(line):
        return None
    head = _HEAD.match(line)
    return f"{_LEVEL[head[1]]}{head[3]}" if head else line
