"""One small ONNX Runtime wrapper for the learned signals: one thread, arrays in, arrays out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from ..catalog.artifact import ArtifactError

Array = NDArray[np.int64] | NDArray[np.float32]
Arrays = Mapping[str, Array]


class OnnxGraph:
    """A loaded ONNX file. Calls are synchronous and take microseconds; they may come from any thread."""

    def __init__(self, path: Path, threads: int = 1) -> None:
        """Raises ArtifactError when ONNX Runtime cannot load the file."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = threads
        options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        # A signal must not hold on to the memory of the longest prompt that it ever saw.
        options.enable_cpu_mem_arena = False
        try:
            self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime raises classes of its own without a common base
            raise ArtifactError(f"{path}: ONNX Runtime cannot load it ({error})") from error
        self._outputs = [output.name for output in self._session.get_outputs()]

    def __call__(self, inputs: Arrays, output: str = "") -> NDArray[np.float32]:
        """The output of that name, the first by default."""
        result: NDArray[np.float32] = self._session.run([output] if output else self._outputs[:1], inputs)[0]
        return result

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(one.name for one in self._session.get_inputs())

    @property
    def metadata(self) -> Mapping[str, str]:
        """What the file says of itself."""
        about: Mapping[str, str] = self._session.get_modelmeta().custom_metadata_map
        return about
