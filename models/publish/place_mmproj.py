"""Put an mmproj file that was checked beside its model's weights."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ..catalog.artifact import MMPROJ_FILE, Artifact, ProjectorEntry, save_manifest, sha256_of
from ..catalog.mmproj import read_mmproj
from .placing import Placing, place


def place_mmproj(model: Artifact, file: Path, placing: Placing) -> Artifact:
    """Copy, link or move it, and name it in the model's manifest. Raises ArtifactError: it cannot be written."""
    target = model.folder / MMPROJ_FILE
    place(file, target.with_name(target.name + ".partial"), placing).replace(target)
    entry = ProjectorEntry(
        file=target.name,
        sha256=sha256_of(target),
        size_bytes=target.stat().st_size,
        model_sha256=model.manifest.sha256,
        note=f"{read_mmproj(target).kind}, added from {file.name}",
    )
    return save_manifest(msgspec.structs.replace(model.manifest, projector=entry), model.folder)
