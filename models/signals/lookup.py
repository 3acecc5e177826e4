"""Find the artifact that computes a learned signal.

A signal about a model's answers belongs to exactly one version of its weights (`judges_sha256` in the manifest); for
any other version it is not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from ..catalog.artifact import SHIPPED, Artifact, ArtifactNotFound, list_artifacts

SignalKind = Literal["embedding", "edge.quality", "confidence", "pair", "same-answer", "heard-words"]


def find_signal(kind: SignalKind, model: Artifact | None = None, extra_dirs: Sequence[Path] = ()) -> Artifact:
    """Find the artifact that computes `kind`.

    Args:
        kind: the signal.
        model: accept only a signal that was trained on exactly these weights.
        extra_dirs: folders of artifacts that take precedence over the shipped ones.

    Raises:
        ArtifactNotFound: no artifact computes `kind`, or none for this version of `model`; names the ones that exist.
    """
    candidates = [artifact for artifact in list_artifacts(extra_dirs) if artifact.manifest.signal == kind]
    candidates.sort(key=lambda artifact: artifact.folder.parent == SHIPPED)
    for artifact in candidates:
        if model is None or artifact.manifest.judges_sha256 == model.manifest.sha256:
            return artifact
    if model is None or not candidates:
        raise ArtifactNotFound(f"no artifact computes {kind}")
    names = ", ".join(artifact.name for artifact in candidates)
    raise ArtifactNotFound(f"{names}: made for another version of {model.name} than {model.manifest.sha256[:12]}")


def find_judged_artifact(signal: Artifact, extra_dirs: Sequence[Path] = ()) -> Artifact:
    """Find the artifact whose weights `signal` was trained on.

    Raises:
        ArtifactNotFound: these weights are not among the known artifacts.
    """
    for artifact in list_artifacts(extra_dirs):
        if artifact.manifest.sha256 == signal.manifest.judges_sha256:
            return artifact
    raise ArtifactNotFound(
        f"{signal.name} was made for weights with sha256 {signal.manifest.judges_sha256}, which are not here"
    )
