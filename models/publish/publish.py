"""Publishing of weights as an artifact: weights and manifest in one folder. The weights are activated by rename.

A weights file is copied, linked or moved into the artifact's folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from ..catalog.artifact import (
    MMPROJ_FILE,
    Answers,
    Artifact,
    ArtifactError,
    Manifest,
    ProjectorEntry,
    save_manifest,
    sha256_of,
    verify_artifact,
)
from ..catalog.gguf import read_gguf
from ..catalog.projector import read_mmproj

PlaceMode = Literal["copy", "link", "move"]


class PublishGate(Protocol):
    """Checks a GGUF before it is published; `comparison.compare.Gate` is one."""

    def check(self, file: Path, /) -> dict[str, float]:
        """Return figures for the manifest. Raises ArtifactError: the file is refused."""
        ...


def publish_gguf(
    weights: Path,
    name: str,
    root: Path,
    *,
    command: str = "",
    licence: str | None = None,
    note: str = "",
    answers: Answers = "text",
    mode: PlaceMode = "copy",
    gate: PublishGate | None = None,
) -> Artifact:
    """Place `weights` at `root/name/model.gguf`, write a manifest from the file's metadata, and verify the result.

    `mode`: see `place`; `licence` defaults to the file's, else "unknown"; `gate`: must be passed. Raises ArtifactError.
    """
    gguf = read_gguf(weights)
    metrics = {} if gate is None else gate.check(weights)
    folder = root / name
    partial = place(weights, folder / "model.gguf.partial", mode)
    manifest = Manifest(
        name=name,
        file="model.gguf",
        sha256=sha256_of(partial),
        size_bytes=partial.stat().st_size,
        format="gguf",
        architecture=gguf.architecture,
        quantisation=gguf.quantisation,
        context_length=gguf.context_length,
        licence=licence or gguf.licence or "unknown",
        parameters=gguf.parameters,
        refuse_token=gguf.refuse_token,
        tokenizer_sha256=gguf.tokenizer_sha256,
        chat_template_sha256=hashlib.sha256(gguf.chat_template.encode()).hexdigest() if gguf.chat_template else None,
        metrics=metrics,
        answers=answers,
        command=command,
        note=note,
    )
    partial.replace(folder / manifest.file)
    artifact = save_manifest(manifest, folder)
    verify_artifact(artifact)
    return artifact


def place(source: Path, target: Path, mode: PlaceMode) -> Path:
    """Put `source` at `target`, whose folder is created, and return `target`. Raises ArtifactError and leaves no part.

    `link` makes a hard link, which takes no space and outlives the original's name; across file systems it makes a
    symbolic link. `move` falls back to a copy across file systems.
    """
    is_new = not target.parent.exists()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        if mode == "link":
            _link(source.resolve(), target)
        else:
            if target.parent.stat().st_dev != source.stat().st_dev or mode == "copy":
                check_space(source.stat().st_size, target.parent)
            if mode == "copy":
                shutil.copyfile(source, target)
            else:
                shutil.move(source, target)
    except (OSError, ArtifactError) as error:
        with contextlib.suppress(OSError):
            target.unlink(missing_ok=True)
            if is_new:
                target.parent.rmdir()
        if isinstance(error, ArtifactError):
            raise
        raise ArtifactError(f"{target.parent}: the weights cannot be written: {error.strerror}") from error
    return target


def place_mmproj(model: Artifact, file: Path, mode: PlaceMode) -> Artifact:
    """Put a checked mmproj file beside its model's weights, and name it in the manifest. Raises ArtifactError."""
    target = model.folder / MMPROJ_FILE
    place(file, target.with_name(target.name + ".partial"), mode).replace(target)
    entry = ProjectorEntry(
        file=target.name,
        sha256=sha256_of(target),
        size_bytes=target.stat().st_size,
        model_sha256=model.manifest.sha256,
        note=f"{read_mmproj(target).kind}, added from {file.name}",
    )
    return save_manifest(msgspec.structs.replace(model.manifest, projector=entry), model.folder)


def check_space(needed_bytes: int, folder: Path) -> None:
    """Compare with the free space where `folder` is, or will be. Raises ArtifactError, with both figures."""
    while not folder.exists():
        folder = folder.parent
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        raise ArtifactError(
            f"{folder}: {needed_bytes / 2**20:,.0f} MiB are needed, but {free_bytes / 2**20:,.0f} MiB are free"
        )


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        target.symlink_to(source)
