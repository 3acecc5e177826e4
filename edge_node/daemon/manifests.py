"""Read the manifests of this box's models at each use, because a fleet's bundle may bring other models.

`model_dirs` are the folders that are searched before the models that ship.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from models.catalog.artifact import ArtifactError, find_artifact, list_artifacts
from router.policy.adapters import ModelAdapters
from router.policy.compiled import ModelTemperature
from router.policy.signals import OPENAI_TEMPERATURE
from router.types import Transcripts

from ..config.schema import EngineConfig


def cache_scope(config: EngineConfig, model_dirs: Sequence[Path]) -> bytes:
    """Return model hashes and settings: other weights, another grammar or KV type may give other answers."""
    try:
        artifacts = list_artifacts(model_dirs)
    except ArtifactError:
        return b""  # the engine reports it
    grammar = "calls" if config.restrict_tool_arguments else ""
    return (
        "\n".join(
            f"{artifact.name} {artifact.version} {grammar if artifact.manifest.answers == 'calls' else ''}"
            for artifact in artifacts
        ).encode()
        + config.kv_type.encode()
    )


def model_temperatures(model_dirs: Sequence[Path]) -> ModelTemperature:
    """Return the function from a model to its temperature; 1 (what the engine uses) for a manifest that names none."""

    def temperature(model: str) -> float | None:
        try:
            manifest = find_artifact(model, model_dirs).manifest
        except ArtifactError:
            return None  # the engine reports it
        return OPENAI_TEMPERATURE if manifest.temperature is None else manifest.temperature

    return temperature


def transcripts_of(model_dirs: Sequence[Path]) -> Callable[[str], Transcripts]:
    """Return the function from a model to the form in which it reads transcripts."""

    def transcripts(model: str) -> Transcripts:
        try:
            return find_artifact(model, model_dirs).manifest.transcripts
        except ArtifactError:
            return "written"

    return transcripts


def model_adapters(model_dirs: Sequence[Path]) -> ModelAdapters:
    """Return the function from a model to the names of its adapters; None for a model that is not there."""

    def adapters(model: str) -> Sequence[str] | None:
        try:
            return tuple(find_artifact(model, model_dirs).manifest.adapters)
        except ArtifactError:
            return None

    return adapters


def weights_of(model_dirs: Sequence[Path]) -> Callable[[str], str]:
    """Return the function from a model to the hash of its weights and what belongs to them; "" if it is not there."""

    def weights(model: str) -> str:
        try:
            return find_artifact(model, model_dirs).version
        except ArtifactError:
            return ""

    return weights
