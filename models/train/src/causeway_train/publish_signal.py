"""Publishing of router signals as artifacts, and the cards of artifacts that are made here."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from causeway_server.models.catalog.artifact import (
    Artifact,
    DataSource,
    Manifest,
    SignalKind,
    save_manifest,
    sha256_of,
    verify_artifact,
)

LICENCE = "Apache-2.0"


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
    measured = (
        ["## Measured", "", "The figures were measured on prompts that were held back from training.", "", *figures]
        if figures
        else []
    )
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
