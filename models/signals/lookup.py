"""Learned signals as artifacts: which kinds there are, and how the one for a model is found.

A signal about a model's answers belongs to exactly one version of its weights (`judges_sha256` of the manifest): beside
any other it is not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from ..catalog.artifact import SHIPPED, Artifact, ArtifactNotFound, list_artifacts

SignalKind = Literal["embedding", "scope", "edge.quality", "confidence"]


def find_signal(kind: SignalKind, model: Artifact | None = None, extra_dirs: Sequence[Path] = ()) -> Artifact:
    """The signal of that kind, one in `extra_dirs` before one that ships; with `model`, the one that judges exactly
    these weights.

    Raises ArtifactNotFound, naming what there is instead.
    """
    found = [one for one in list_artifacts(extra_dirs) if one.manifest.signal == kind]
    known = sorted(found, key=lambda one: one.folder.parent == SHIPPED)
    for artifact in known:
        if model is None or artifact.manifest.judges_sha256 == model.manifest.sha256:
            return artifact
    if model is None or not known:
        raise ArtifactNotFound(f"no artifact computes {kind}")
    names = ", ".join(artifact.name for artifact in known)
    raise ArtifactNotFound(f"{names}: judges another version of {model.name} than {model.manifest.sha256[:12]}")


def find_judged(signal: Artifact, extra_dirs: Sequence[Path] = ()) -> Artifact:
    """The artifact that `signal` belongs to. Raises ArtifactNotFound when those weights are not here."""
    for artifact in list_artifacts(extra_dirs):
        if artifact.manifest.sha256 == signal.manifest.judges_sha256:
            return artifact
    raise ArtifactNotFound(f"{signal.name} judges {signal.manifest.judges_sha256}, which is not here")
