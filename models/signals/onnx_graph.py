"""A small ONNX Runtime session for the learned signals: one thread, arrays in, arrays out.

A graph runs on ONNX Runtime's execution provider for TensorRT, else CUDA, else the CPU.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from ..catalog.artifact import ArtifactError

Array = NDArray[np.int64] | NDArray[np.float32]
Arrays = Mapping[str, Array]

_ORDER = ("TensorrtExecutionProvider", "CUDAExecutionProvider")
_CPU = "CPUExecutionProvider"
# A smaller graph takes the CPU tens of microseconds, about as long as a GPU takes to start a few kernels; and TensorRT
# would compile it again at each start.
SMALL_BYTES = 8 * 1024 * 1024


class OnnxGraph:
    """A loaded ONNX file. Calls are synchronous, take microseconds, and may come from any thread."""

    def __init__(self, path: Path) -> None:
        """Load a file. Raises ArtifactError: ONNX Runtime cannot load it."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        # Without it, x86 CPUs that have no VNNI saturate sums of int8 products in 16 bits and get other results.
        options.add_session_config_entry("session.x64quantprecision", "1")
        # The arena would keep the memory of the longest prompt for the life of the process.
        options.enable_cpu_mem_arena = False
        try:
            providers = choose_providers(path.stat().st_size)
            self._session = onnxruntime.InferenceSession(str(path), options, providers=providers)
        except Exception as error:  # onnxruntime raises classes of its own without a common base
            raise ArtifactError(f"{path}: ONNX Runtime cannot load it ({error})") from error
        self._outputs = [output.name for output in self._session.get_outputs()][:1]

    def __call__(self, inputs: Arrays) -> NDArray[np.float32]:
        """Run the graph and return its first output."""
        result: NDArray[np.float32] = self._session.run(self._outputs, inputs)[0]
        return result

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(value.name for value in self._session.get_inputs())

    @property
    def metadata(self) -> Mapping[str, str]:
        """The custom metadata of the file."""
        metadata: Mapping[str, str] = self._session.get_modelmeta().custom_metadata_map
        return metadata


def choose_providers(size_bytes: int, available: Collection[str] | None = None) -> list[str]:
    """Return the providers for a graph, best first; the CPU is always the last resort.

    Args:
        size_bytes: The size of the graph's file.
        available: Providers of this build of ONNX Runtime; None: it is asked.
    """
    found = onnxruntime.get_available_providers() if available is None else available
    gpu = [name for name in _ORDER if name in found] if size_bytes >= SMALL_BYTES else []
    return [*gpu, _CPU]


def short_names(providers: Collection[str]) -> list[str]:
    """Return the providers' short names, for people."""
    return [name.removesuffix("ExecutionProvider").replace("Tensorrt", "TensorRT") for name in providers]
