"""The embedding rows of a GGUF's tokens at full precision: vectors that mean what the tokens mean."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray


def embedding_rows(path: Path) -> NDArray[np.float32]:
    """Return the rows, [vocabulary, dimensions]."""
    tensor = next(one for one in gguf.GGUFReader(path).tensors if one.name == "token_embd.weight")
    return np.array(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32)
