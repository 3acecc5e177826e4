"""Which of ONNX Runtime's execution providers run the learned signals: TensorRT, else CUDA, else the CPU."""

from __future__ import annotations

from collections.abc import Collection

import onnxruntime

_ORDER = ("TensorrtExecutionProvider", "CUDAExecutionProvider")
_CPU = "CPUExecutionProvider"
# A smaller graph takes the CPU tens of microseconds, about as long as a GPU takes to start a few kernels; and TensorRT
# would compile it anew at each start.
SMALL_BYTES = 8 * 1024 * 1024


def choose_providers(size_bytes: int, available: Collection[str] | None = None) -> list[str]:
    """Return the providers for a graph, best first; the CPU is always the last resort.

    Args:
        size_bytes: of the graph's file.
        available: providers of this build of ONNX Runtime; None: asked.
    """
    found = onnxruntime.get_available_providers() if available is None else available
    gpu = [name for name in _ORDER if name in found] if size_bytes >= SMALL_BYTES else []
    return [*gpu, _CPU]


def short_names(providers: Collection[str]) -> list[str]:
    """Return the providers' names as people read them."""
    return [name.removesuffix("ExecutionProvider").replace("Tensorrt", "TensorRT") for name in providers]
