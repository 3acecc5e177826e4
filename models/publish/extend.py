"""Extend a model by a LoRA adapter or an mmproj file: check it with llama.cpp, place it beside the weights, and name it
in the manifest.
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from ..catalog.artifact import (
    NAME,
    SHIPPED,
    AdapterEntry,
    Artifact,
    ArtifactError,
    adapter_file,
    save_manifest,
    sha256_of,
)
from .add import model_name
from .check import check_adapter, check_mmproj
from .publish import Placing, place, place_mmproj


def add_adapter(
    model: Artifact,
    file: Path,
    *,
    name: str | None = None,
    scale: float = 1.0,
    placing: Placing = "copy",
    replace: bool = False,
) -> str:
    """Add the adapter in `file` to `model`.

    Args:
        model: the artifact of its base model.
        file: the adapter's GGUF.
        name: how requests name it, behind the model's name; defaults to the file's name.
        scale: how strongly it is applied.
        placing: copy the file, link it, or move it.
        replace: the model may have an adapter of this name, which gives way.

    Returns:
        What requests ask for: `MODEL+NAME`.

    Raises:
        ArtifactError: the model cannot have adapters, the name is taken or not valid, or llama.cpp cannot use the file
            with this model.
    """
    chosen = name or model_name(file.stem)
    check_extensible(model, "adapters")
    if not NAME.fullmatch(chosen):
        raise ArtifactError(
            f"{chosen!r} is not a valid name: use a-z, 0-9, '.', '_' and '-', at most 64 characters; see --name"
        )
    if chosen in model.manifest.adapters and not replace:
        raise ArtifactError(f"{model.name} has an adapter {chosen!r} already; choose another --name, or use --replace")
    if not math.isfinite(scale) or not scale:
        raise ArtifactError(f"a scale of {scale:g}: use a finite number other than 0")
    check_adapter(file, model.path)
    target = model.folder / adapter_file(chosen)
    partial = place(file, target.with_name(target.name + ".partial"), placing)
    partial.replace(target)
    entry = AdapterEntry(target.name, sha256_of(target), target.stat().st_size, scale, f"added from {file.name}")
    adapters = {**model.manifest.adapters, chosen: entry}
    save_manifest(msgspec.structs.replace(model.manifest, adapters=adapters), model.folder)
    return f"{model.name}+{chosen}"


def add_mmproj(model: Artifact, file: Path, placing: Placing = "copy") -> Artifact:
    """Add the mmproj file of a vision model, in the place of an earlier one or of a projector.

    Raises:
        ArtifactError: the model cannot have one, llama.cpp cannot use the file with this model, or it cannot be copied.
    """
    check_extensible(model, "an mmproj file")
    check_mmproj(file, model.path)
    return place_mmproj(model, file, placing)


def check_extensible(model: Artifact, what: str) -> None:
    """Check that something may be added to a model's folder and manifest.

    Raises:
        ArtifactError: it is no language model, or ships with Causeway.
    """
    if model.manifest.format != "gguf" or model.manifest.signal:
        raise ArtifactError(f"{model.name} is no language model in a GGUF: only such a model can have {what}")
    if model.folder.is_relative_to(SHIPPED):
        raise ArtifactError(
            f"{model.name} ships with Causeway and stays as it is: "
            f"`causeway-models add {model.path} --name MINE` makes a copy that can have {what}"
        )
