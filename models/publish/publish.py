"""Publishing of weights as an artifact: weights, manifest and card in one folder. The weights are activated by rename.

A weights file is copied, linked or moved into the artifact's folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from ..catalog.artifact import (
    MMPROJ_FILE,
    Answers,
    Artifact,
    ArtifactError,
    DataSource,
    Manifest,
    ProjectorEntry,
    SignalKind,
    save_manifest,
    sha256_of,
    verify_artifact,
)
from ..catalog.gguf import read_gguf
from ..catalog.projector import read_mmproj

LICENCE = "Apache-2.0"
PlaceMode = Literal["copy", "link", "move"]


class SignalMetadata(msgspec.Struct, frozen=True):
    """Manifest fields of a signal that cannot be derived from its file."""

    kind: SignalKind
    architecture: str
    quantisation: str
    command: str
    note: str
    metrics: Mapping[str, float]
    seed: int | None = None
    data: tuple[DataSource, ...] = ()


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
) -> Artifact:
    """Place `weights` at `root/name/model.gguf`, write a manifest from the file's metadata, and verify the result.

    Args:
        mode: The way of installing the weights, see `place`.
        licence: Defaults to the licence that the file names, else "unknown".

    Raises:
        ArtifactError: The file is not a readable GGUF, or cannot be placed.
    """
    gguf = read_gguf(weights)
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
        answers=answers,
        command=command,
        note=note,
    )
    partial.replace(folder / manifest.file)
    artifact = save_manifest(manifest, folder)
    verify_artifact(artifact)
    return artifact


def publish_signal(
    weights: Path,
    name: str,
    root: Path,
    metadata: SignalMetadata,
    *,
    judged: Artifact | None = None,
    appendix: Sequence[str] = (),
) -> Artifact:
    """Copy the weights of a router signal to `root/name`, write manifest and card, and verify the copy.

    Args:
        judged: The artifact whose outputs the signal was trained on; the signal is used with exactly that version.
        appendix: Lines of Markdown at the end of the card.
    """
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"model{weights.suffix}.partial"
    shutil.copyfile(weights, partial)
    manifest = Manifest(
        name=name,
        file=partial.stem,
        sha256=sha256_of(partial),
        size_bytes=partial.stat().st_size,
        format=weights.suffix.removeprefix("."),
        architecture=metadata.architecture,
        quantisation=metadata.quantisation,
        context_length=0,
        licence=LICENCE,
        data=metadata.data,
        metrics={key: round(value, 4) for key, value in metadata.metrics.items()},
        signal=metadata.kind,
        judges_sha256=judged.manifest.sha256 if judged else None,
        seed=metadata.seed,
        command=metadata.command,
        note=metadata.note,
    )
    partial.replace(folder / manifest.file)
    artifact = save_manifest(manifest, folder)
    verify_artifact(artifact)
    (folder / "README.md").write_text(signal_card(manifest, appendix), encoding="utf-8")
    return artifact


def signal_card(manifest: Manifest, appendix: Sequence[str] = ()) -> str:
    """Return the card of a signal: `card` with its figures, and `appendix` at the end."""
    figures = [f"- {key}: {value:g}" for key, value in manifest.metrics.items()]
    measured = ["## Measured", "", "On prompts held back from training.", "", *figures] if figures else []
    return card(manifest, manifest.note, measured, appendix)


def card(
    manifest: Manifest,
    purpose: str,
    measured: Sequence[str],
    appendix: Sequence[str] = (),
    facts: Mapping[str, str] | None = None,
) -> str:
    """Return the model card, the `README.md` beside the weights: purpose, facts, figures, and training data.

    Args:
        manifest: Describes the weights.
        purpose: The purpose of the model.
        measured: Lines of Markdown about its figures.
        appendix: Lines of Markdown at the end.
        facts: Further rows of the table of facts; empty ones are left out.
    """
    parameters = f", {manifest.parameters:,} parameters" if manifest.parameters else ""
    rows = {
        "architecture": manifest.architecture + parameters,
        "weights": f"{manifest.quantisation}, {manifest.size_bytes:,} bytes",
        "licence": manifest.licence,
        "made by": f"`{manifest.command}`" if manifest.command else "",
        **(facts or {}),
    }
    data = [f"- {one.name} ({one.licence}): {one.attribution}" for one in manifest.data]
    sections = [
        [f"# {manifest.name}"],
        [textwrap.fill(purpose, 120, break_long_words=False, break_on_hyphens=False)] if purpose else [],
        ["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows.items() if value)],
        measured,
        ["## Trained on", "", *data] if data else [],
        appendix,
    ]
    return "\n\n".join("\n".join(section) for section in sections if section) + "\n"


def place(source: Path, target: Path, mode: PlaceMode) -> Path:
    """Put `source` at `target`, whose folder is created, and return `target`.

    `link` makes a hard link, which takes no space and outlives the original's name; across file systems it makes a
    symbolic link. `move` falls back to a copy across file systems.

    Raises:
        ArtifactError: The target cannot be written; no part of it is left behind.
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
        target.unlink(missing_ok=True)
        if is_new:
            with contextlib.suppress(OSError):
                target.parent.rmdir()
        if isinstance(error, ArtifactError):
            raise
        raise ArtifactError(f"{target.parent}: the weights cannot be written: {error.strerror}") from error
    return target


def place_mmproj(model: Artifact, file: Path, mode: PlaceMode) -> Artifact:
    """Put an mmproj file that was checked beside its model's weights, and name it in the manifest.

    Raises:
        ArtifactError: It cannot be written.
    """
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
    """Compare `needed_bytes` with the free space where `folder` is, or will be.

    Raises:
        ArtifactError: There is too little; the message has both figures.
    """
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
