"""The weighted mean of two networks, one of which was trained from the other. The mean is often better than either.

A fine-tuned network stays close enough to its origin that weights on the line between the two work well: the origin
still has the abilities that fine-tuning lost (Wortsman et al. 2022, "Robust fine-tuning of zero-shot models").
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

import numpy as np
from gguf import GGUFReader

from causeway_server.models.catalog.artifact import ArtifactError

_FAMILY = ("general.architecture", "tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.chat_template")
"""Metadata that both networks must share, so that their weights are comparable."""


def average(first: Path, second: Path, target: Path, share: float) -> None:
    """Write `target`: `share` (0..1) times the weights of `second` plus the rest of `first`, both F32.

    Metadata and tokenizer are those of `second`.

    Raises:
        ArtifactError: a file is not a readable GGUF or not F32, or the two networks are not related.
    """
    draft = target.with_suffix(".draft")
    try:
        origin = open_gguf(first)
        shutil.copyfile(second, draft)
        mixed = open_gguf(draft, "r+")
        _check_related(origin, mixed, first, second)
        weights = {tensor.name: tensor.data for tensor in origin.tensors}
        for tensor in mixed.tensors:
            tensor.data[...] = (1.0 - share) * weights[tensor.name] + share * tensor.data
        mixed.data.flush()
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def open_gguf(path: Path, mode: Literal["r", "r+"] = "r") -> GGUFReader:
    """Map a GGUF into memory; its weights are read, or with `r+` written, in place."""
    try:
        return GGUFReader(path, mode)
    except (OSError, ValueError, IndexError, KeyError, UnicodeDecodeError, OverflowError, MemoryError) as error:
        raise ArtifactError(
            f"{path} is not a readable GGUF file, because it is cut short or damaged; copy the file again ({error})"
        ) from error


def _check_related(first: GGUFReader, second: GGUFReader, name: Path, other: Path) -> None:
    for key in _FAMILY:
        one, two = (reader.get_field(key) for reader in (first, second))
        if (one and one.contents()) != (two and two.contents()):
            raise ArtifactError(f"{name} and {other} are not related: they differ in the key {key}")
    shapes = [{tensor.name: tuple(tensor.shape) for tensor in reader.tensors} for reader in (first, second)]
    if shapes[0] != shapes[1]:
        differing = sorted(
            key for key in shapes[0].keys() | shapes[1].keys() if shapes[0].get(key) != shapes[1].get(key)
        )
        raise ArtifactError(f"{name} and {other} are not related: they differ in the tensor {differing[0]}")
    for reader, path in ((first, name), (second, other)):
        other_type = next((tensor for tensor in reader.tensors if tensor.data.dtype != np.float32), None)
        if other_type is not None:
            kind = other_type.tensor_type.name
            raise ArtifactError(
                f"{path}: the tensor {other_type.name} is {kind}, but only F32 files can be averaged; quantise the "
                "average"
            )
