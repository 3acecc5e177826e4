"""A small ONNX Runtime session for the learned signals: one thread, arrays in, arrays out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from ..catalog.artifact import ArtifactError
from .providers import CPU, cache_file, fastest

Array = NDArray[np.int64] | NDArray[np.float32]
Arrays = Mapping[str, Array]


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

        def opened(provider: str) -> onnxruntime.InferenceSession:
            session = onnxruntime.InferenceSession(str(path), options, providers=list(dict.fromkeys((provider, CPU))))
            if session.get_providers()[0] != provider:  # ONNX Runtime falls back with a line on stderr
                raise ArtifactError(f"ONNX Runtime cannot start {provider} on this device")
            return session

        try:
            self._session = opened(fastest(path, opened, cache_file(), onnxruntime.get_available_providers()))
        except Exception as error:  # onnxruntime raises classes of its own without a common base
            raise ArtifactError(f"{path}: ONNX Runtime cannot load the file ({error})") from error
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
