"""The projector of a language model, with the encoder that it belongs to: they are used together, or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from .artifact import Artifact, ArtifactCorrupt, ProjectorEntry, find_artifact, sha256_of, verify_artifact


class Projector(msgspec.Struct, frozen=True):
    """Checked files. `digest` tells projectors apart."""

    encoder: Path
    path: Path
    digest: str
    tokens: int


def find_projector(model: str, model_dirs: Sequence[Path] = ()) -> Projector | None:
    """Return the projector that a model's manifest names; None if it names none.

    Raises:
        ArtifactNotFound: there is no such model, or the encoder or a file is missing.
        ArtifactCorrupt: it was made for other weights or another encoder, or a file is not what its manifest says.
    """
    artifact = find_artifact(model, model_dirs)
    entry = artifact.manifest.projector
    if entry is None:
        return None
    encoder = find_artifact(entry.encoder, model_dirs)
    verify_artifact(encoder)
    _check_bound(artifact, entry, encoder)
    path = artifact.folder / entry.file
    if not path.is_file() or sha256_of(path) != entry.sha256:
        raise ArtifactCorrupt(f"{path}: the projector is missing, or is not the one that the manifest describes")
    return Projector(encoder.path, path, entry.sha256, entry.tokens)


def _check_bound(model: Artifact, entry: ProjectorEntry, encoder: Artifact) -> None:
    for name, wanted, found in (
        (model.name, entry.model_sha256, model.manifest.sha256),
        (entry.encoder, entry.encoder_sha256, encoder.manifest.sha256),
    ):
        if wanted != found:
            raise ArtifactCorrupt(
                f"{model.folder / entry.file}: the projector was made for {name} with SHA-256 {wanted[:12]}, and here "
                f"is {found[:12]}: train it for this one, or bring the other one back"
            )
