"""The importance matrix (llama.cpp's imatrix): the mean squared input of each matrix column over training examples.

llama.cpp's quantiser weights rounding errors by this matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from ..network.llama import Block, Llama
from .batches import answer_logits
from .mixture import Example

# Parts of a block → the matrices in GGUF that read the same input.
_MATRICES = {
    "qkv": ("attn_q", "attn_k", "attn_v"),
    "out": ("attn_output",),
    "gate_up": ("ffn_gate", "ffn_up"),
    "down": ("ffn_down",),
}


@torch.no_grad()
def importance(network: Llama, batches: Sequence[Sequence[Example]]) -> dict[str, Tensor]:
    """Return mean squares [columns] by the matrix's GGUF name, over all positions of the batches, padding included.

    The tied embedding is excluded: it is read one row at a time.
    """
    network.eval()
    sums: dict[str, Tensor] = {}
    hooks = []
    for index, block in enumerate(network.blocks):
        assert isinstance(block, Block)
        for part, names in _MATRICES.items():
            linear: nn.Linear = getattr(block, part)
            keys = [f"blk.{index}.{name}.weight" for name in names]
            hooks.append(linear.register_forward_pre_hook(_accumulator(sums, keys)))
    for batch in batches:
        answer_logits(network, batch)
    for hook in hooks:
        hook.remove()
    return {key: total / len(batches) for key, total in sums.items()}


def save_importance(matrix: dict[str, Tensor], path: Path) -> None:
    """Write one `.npz` of float32 arrays, without pickle."""
    np.savez(path, allow_pickle=False, **{key: value.numpy() for key, value in matrix.items()})


def _accumulator(sums: dict[str, Tensor], keys: Sequence[str]) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def accumulate(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        squares = inputs[0].float().square().mean(dim=(0, 1))
        for key in keys:
            sums[key] = sums.get(key, torch.zeros_like(squares)) + squares

    return accumulate
