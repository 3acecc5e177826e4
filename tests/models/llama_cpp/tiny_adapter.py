"""A LoRA adapter of the tiny model, and the tiny model with the adapter's changes in its weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGUFWriter
from numpy.typing import NDArray

from .tiny_gguf import write_tiny_gguf

RANK, ALPHA = 4, 8.0
_WIDTH, _HIDDEN = 64, 128
_SHAPES = {  # rows and columns of the adapted weights
    "blk.0.attn_q.weight": (_WIDTH, _WIDTH),
    "blk.0.ffn_up.weight": (_HIDDEN, _WIDTH),
    "blk.1.attn_v.weight": (_WIDTH, _WIDTH),
    "blk.1.ffn_down.weight": (_WIDTH, _HIDDEN),
}
_STRENGTH = 0.25


def _pairs(seed: int) -> dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]]:
    draw = np.random.default_rng(seed)
    return {
        name: (
            (draw.standard_normal((RANK, columns)) * _STRENGTH).astype(np.float32),
            (draw.standard_normal((rows, RANK)) * _STRENGTH).astype(np.float32),
        )
        for name, (rows, columns) in _SHAPES.items()
    }


def write_tiny_adapter(
    path: Path, seed: int = 1, *, architecture: str = "llama", kind: str = "lora", rank_of_b: int = RANK, name: str = ""
) -> Path:
    """Write an adapter; the keywords make it one that does not fit the tiny model."""
    writer = GGUFWriter(path, architecture)
    writer.add_type("adapter")
    writer.add_string("adapter.type", kind)
    writer.add_float32("adapter.lora.alpha", ALPHA)
    for weight, (a, b) in _pairs(seed).items():
        writer.add_tensor(f"{name or weight}.lora_a", a)
        writer.add_tensor(f"{name or weight}.lora_b", np.ascontiguousarray(b[:, :rank_of_b]))
        if name:
            break
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_merged_gguf(path: Path, seed: int = 1, scale: float = 1.0) -> Path:
    """Write the tiny model with an adapter's changes: what the two together have to answer."""
    deltas = {name: np.float32(scale * ALPHA / RANK) * (b @ a) for name, (a, b) in _pairs(seed).items()}
    return write_tiny_gguf(path, deltas=deltas)
