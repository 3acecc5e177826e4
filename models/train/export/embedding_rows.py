"""The embedding rows of a GGUF's tokens at full precision: what a projector learns to write in their place."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from ...catalog.artifact import ArtifactError

_NAME = "token_embd.weight"


def embedding_rows(path: Path) -> NDArray[np.float32]:
    """Return the rows, [vocabulary, dimensions]. Raises ArtifactError: the file has none."""
    try:
        tensor = next(one for one in gguf.GGUFReader(path).tensors if one.name == _NAME)
    except (OSError, ValueError, StopIteration) as error:
        raise ArtifactError(f"{path}: no GGUF with the tensor {_NAME}") from error
    return np.array(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32)
