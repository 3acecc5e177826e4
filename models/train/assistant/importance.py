"""How much each column of a matrix matters: the mean square of what it is multiplied with, over real examples.

llama.cpp's quantiser weighs rounding errors by it (there: imatrix).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from ..network.llama import Block, Llama
from .mixture import Example
from .trainer import answer_logits

_READERS = {
    "qkv": ("attn_q", "attn_k", "attn_v"),
    "out": ("attn_output",),
    "gate_up": ("ffn_gate", "ffn_up"),
    "down": ("ffn_down",),
}


@torch.no_grad()
def importance(network: Llama, batches: Sequence[Sequence[Example]]) -> dict[str, Tensor]:
    """Mean squares [columns] by the matrix's name in GGUF, over all positions of the batches, padding too.

    The tied embedding is left out: as a table its columns are read one row at a time.
    """
    network.eval()
    sums: dict[str, Tensor] = {}
    hooks = []
    for index, block in enumerate(network.blocks):
        assert isinstance(block, Block)
        for part, names in _READERS.items():
            linear: nn.Linear = getattr(block, part)
            keys = [f"blk.{index}.{name}.weight" for name in names]
            hooks.append(linear.register_forward_pre_hook(_adder(sums, keys)))
    for batch in batches:
        answer_logits(network, batch)
    for hook in hooks:
        hook.remove()
    return {key: total / len(batches) for key, total in sums.items()}


def save(found: dict[str, Tensor], path: Path) -> None:
    """One `.npz` of float32 arrays, no pickle."""
    np.savez(path, allow_pickle=False, **{key: value.numpy() for key, value in found.items()})


def _adder(sums: dict[str, Tensor], keys: Sequence[str]) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def add(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        squares = given[0].float().square().mean(dim=(0, 1))
        for key in keys:
            sums[key] = sums.get(key, torch.zeros_like(squares)) + squares

    return add
