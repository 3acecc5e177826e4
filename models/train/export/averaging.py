"""Two networks of one descent into one: the mean of their weights, which is often better than either.

A network that went on from another with other lessons stays so near that the line between the two is good all along:
what the one forgot, the other still knows (Wortsman et al. 2022, "Robust fine-tuning of zero-shot models").
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from gguf import GGUFReader

from ...catalog.artifact import ArtifactError
from ...catalog.gguf import open_gguf

_FAMILY = ("general.architecture", "tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.chat_template")
"""What two networks must share for one place in their weights to mean the same."""


def average(first: Path, second: Path, target: Path, share: float) -> None:
    """Write `target`: `share` (0..1) of `second`, the rest of `first`; both F32. All but the weights is `second`'s.

    Raises ArtifactError when they are no two networks of one descent.
    """
    draft = target.with_suffix(".draft")
    try:
        mine = open_gguf(first)
        shutil.copyfile(second, draft)
        mixed = open_gguf(draft, "r+")
        _check(mine, mixed, first, second)
        weights = {tensor.name: tensor.data for tensor in mine.tensors}
        for tensor in mixed.tensors:
            tensor.data[...] = (1.0 - share) * weights[tensor.name] + share * tensor.data
        mixed.data.flush()
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def _check(first: GGUFReader, second: GGUFReader, name: Path, other: Path) -> None:
    for key in _FAMILY:
        one, two = (reader.get_field(key) for reader in (first, second))
        if (one and one.contents()) != (two and two.contents()):
            raise ArtifactError(f"{name} and {other} are no relatives: they differ in {key}")
    shapes = [{tensor.name: tuple(tensor.shape) for tensor in reader.tensors} for reader in (first, second)]
    if shapes[0] != shapes[1]:
        odd = sorted(key for key in shapes[0].keys() | shapes[1].keys() if shapes[0].get(key) != shapes[1].get(key))
        raise ArtifactError(f"{name} and {other} are no relatives: they differ in the tensor {odd[0]}")
    for reader, path in ((first, name), (second, other)):
        coarse = next((tensor for tensor in reader.tensors if tensor.data.dtype != np.float32), None)
        if coarse is not None:
            raise ArtifactError(f"{path}: {coarse.name} is {coarse.tensor_type.name}; average F32, then quantise")
