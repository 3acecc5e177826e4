"""How a weights file gets into an artifact's folder: copied, linked or moved."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Literal

import msgspec

from ..catalog.artifact import MMPROJ_FILE, Artifact, ArtifactError, ProjectorEntry, save_manifest, sha256_of
from ..catalog.mmproj import read_mmproj

Placing = Literal["copy", "link", "move"]


def place(source: Path, target: Path, placing: Placing) -> Path:
    """Put `source` at `target`, whose folder is created, and return `target`.

    `link` makes a hard link, which takes no space and outlives the original's name; across file systems it makes a
    symbolic link. `move` falls back to a copy across file systems.

    Raises:
        ArtifactError: it cannot be written; nothing of it is left behind.
    """
    is_new = not target.parent.exists()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        if placing == "link":
            _link(source.resolve(), target)
        else:
            if target.parent.stat().st_dev != source.stat().st_dev or placing == "copy":
                _check_space(source.stat().st_size, target.parent)
            if placing == "copy":
                shutil.copyfile(source, target)
            else:
                shutil.move(source, target)
    except (OSError, ArtifactError) as error:
        target.unlink(missing_ok=True)
        if is_new:
            with contextlib.suppress(OSError):
                target.parent.rmdir()
        if isinstance(error, ArtifactError):
            raise
        raise ArtifactError(f"{target.parent}: the weights cannot be written: {error.strerror}") from error
    return target


def place_mmproj(model: Artifact, file: Path, placing: Placing) -> Artifact:
    """Put an mmproj file that was checked beside its model's weights, and name it in the manifest.

    Raises:
        ArtifactError: it cannot be written.
    """
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


def check_space(needed_bytes: int, folder: Path) -> None:
    """Compare `needed_bytes` with the free space where `folder` is, or will be.

    Raises:
        ArtifactError: there is too little; the message has both figures.
    """
    while not folder.exists():
        folder = folder.parent
    _check_space(needed_bytes, folder)


def _check_space(needed_bytes: int, folder: Path) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        raise ArtifactError(
            f"{folder}: {needed_bytes / 2**20:,.0f} MiB are needed and {free_bytes / 2**20:,.0f} MiB are free"
        )


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        target.symlink_to(source)
