"""Add a projector or an mmproj file to a language model: copy it beside the weights, and name it in the manifest."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ..catalog.artifact import PROJECTOR_FILE, Artifact, ProjectorEntry, save_manifest, sha256_of
from .add_adapter import check_extensible
from .check import check_mmproj
from .place_mmproj import place_mmproj
from .placing import Placing, place


def add_projector(model: Artifact, file: Path, encoder: Artifact, tokens: int, note: str = "") -> Artifact:
    """Add the projector in `file`, in the place of an earlier one.

    Args:
        model: whose embeddings it writes.
        encoder: whose features it reads.
        tokens: that a picture becomes.

    Raises:
        ArtifactError: the model cannot have one, or the file cannot be copied.
    """
    check_extensible(model, "a projector")
    target = model.folder / PROJECTOR_FILE
    place(file, target.with_name(target.name + ".partial"), "copy").replace(target)
    entry = ProjectorEntry(
        file=target.name,
        sha256=sha256_of(target),
        size_bytes=target.stat().st_size,
        model_sha256=model.manifest.sha256,
        encoder=encoder.name,
        encoder_sha256=encoder.manifest.sha256,
        tokens=tokens,
        note=note,
    )
    return save_manifest(msgspec.structs.replace(model.manifest, projector=entry), model.folder)


def add_mmproj(model: Artifact, file: Path, placing: Placing = "copy") -> Artifact:
    """Add the mmproj file of a vision model, in the place of an earlier one or of a projector.

    Raises:
        ArtifactError: the model cannot have one, llama.cpp cannot use the file with this model, or it cannot be copied.
    """
    check_extensible(model, "an mmproj file")
    check_mmproj(file, model.path)
    return place_mmproj(model, file, placing)
