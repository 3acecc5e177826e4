"""Add a projector to a language model: copy it beside the weights, and name it in the manifest with what it needs."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ..catalog.artifact import Artifact, ProjectorEntry, save_manifest, sha256_of
from .add_adapter import check_extensible
from .placing import place

_FILE = "projector.onnx"


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
    target = model.folder / _FILE
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
