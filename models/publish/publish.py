"""Make an artifact: weights, manifest and card in one folder, activated by rename."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from ..catalog.artifact import (
    Answers,
    Artifact,
    ArtifactError,
    DataSource,
    Manifest,
    load_artifact,
    save_manifest,
    sha256_of,
    verify_artifact,
)
from ..catalog.gguf import read_gguf
from ..evaluate.report import EvaluationReport
from ..function_calls.catalog import CATALOG
from ..function_calls.grammar import ANSWER_TOKENS
from ..signals.lookup import SignalKind
from .card import card

LICENCE = "Apache-2.0"
ATTRIBUTIONS = (
    DataSource("HWU64", "CC BY 4.0", "Liu et al. 2019, xliuhw/NLU-Evaluation-Data"),
    DataSource("SNIPS 2017", "CC0 1.0", "Coucke et al. 2018, sonos/nlu-benchmark"),
    DataSource("CLINC150", "CC BY 3.0", "Larson et al. 2019, clinc/oos-eval"),
    DataSource("BANKING77", "CC BY 4.0", "Casanueva et al. 2020, PolyAI-LDN/task-specific-datasets"),
    DataSource("MMLU questions", "MIT", "Hendrycks et al. 2021; only as questions to turn away"),
    DataSource("GSM8K questions", "MIT", "Cobbe et al. 2021; only as questions to turn away"),
)


class SignalMetadata(msgspec.Struct, frozen=True):
    """What a signal's manifest says beside what its file says."""

    kind: SignalKind
    architecture: str
    quantisation: str
    command: str
    note: str
    metrics: Mapping[str, float]
    seed: int | None = None
    data: tuple[DataSource, ...] = ATTRIBUTIONS


def publish_gguf(
    weights: Path,
    name: str,
    root: Path,
    *,
    data: tuple[DataSource, ...] = (),
    metrics: Mapping[str, float] | None = None,
    command: str = "",
    licence: str | None = None,
    seed: int | None = None,
    note: str = "",
    catalog_sha256: str | None = None,
    temperature: float | None = None,
    answer_tokens: int = 0,
    answers: Answers = "text",
) -> Artifact:
    """Copy `weights` to `root/name/model.gguf` beside a manifest made from its own metadata, and verify the copy."""
    about = read_gguf(weights)
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / "model.gguf.partial"
    shutil.copyfile(weights, partial)
    manifest = Manifest(
        name=name,
        file="model.gguf",
        sha256=sha256_of(partial),
        size_bytes=partial.stat().st_size,
        format="gguf",
        architecture=about.architecture,
        quantisation=about.quantisation,
        context_length=about.context_length,
        licence=licence or about.licence or "unknown",
        data=data,
        metrics=dict(metrics or {}),
        parameters=about.parameters,
        refuse_token=about.refuse_token,
        tokenizer_sha256=about.tokenizer_sha256,
        chat_template_sha256=_hash(about.chat_template) if about.chat_template else None,
        temperature=temperature,
        answer_tokens=answer_tokens,
        answers=answers,
        catalog_sha256=catalog_sha256,
        command=command,
        seed=seed,
        note=note,
    )
    partial.replace(folder / manifest.file)
    artifact = save_manifest(manifest, folder)
    verify_artifact(artifact)
    return artifact


def publish_assistant(
    weights: Path,
    name: str,
    root: Path,
    *,
    report: Path | None,
    command: str,
    seed: int | None,
    note: str,
    also: tuple[DataSource, ...] = (),
) -> Artifact:
    """Publish one of the assistants trained here, with its attributions (`also`: what else taught it) and the figures
    of `evaluate --json`.
    """
    reports = msgspec.json.decode(report.read_bytes(), type=list[EvaluationReport]) if report else []
    own = [one for one in reports if one.model == name] or reports
    metrics = {key: value for one in own for key, value in one.metrics("grammar/" if one.grammar else "").items()}
    artifact = publish_gguf(
        weights,
        name,
        root,
        data=(*ATTRIBUTIONS, *also),
        metrics=metrics,
        command=command,
        licence=LICENCE,
        seed=seed,
        note=note,
        catalog_sha256=sha256_of(CATALOG),
        # A call is right or wrong: who says nothing wants the likeliest one, and none is longer than this.
        temperature=0.0,
        answer_tokens=ANSWER_TOKENS,
        answers="calls",
    )
    write_card(artifact, card(artifact.manifest, own))
    return artifact


def publish_signal(
    weights: Path,
    name: str,
    root: Path,
    about: SignalMetadata,
    *,
    judged: Artifact | None = None,
    figures: Sequence[str] = (),
) -> Artifact:
    """Copy `weights` to `root/name` beside a manifest and a card, and verify the copy. `figures`: lines of Markdown."""
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
        architecture=about.architecture,
        quantisation=about.quantisation,
        context_length=0,
        licence=LICENCE,
        data=about.data,
        metrics={key: round(value, 4) for key, value in about.metrics.items()},
        signal=about.kind,
        judges_sha256=judged.manifest.sha256 if judged else None,
        seed=about.seed,
        command=about.command,
        note=about.note,
    )
    partial.replace(folder / manifest.file)
    artifact = save_manifest(manifest, folder)
    verify_artifact(artifact)
    text = card(manifest, ())
    write_card(artifact, text + ("\n" + "\n".join(figures) + "\n" if figures else ""))
    return artifact


def write_card(artifact: Artifact, text: str) -> None:
    (artifact.folder / "README.md").write_text(text, encoding="utf-8")


def remove(name: str, root: Path) -> None:
    """Forget an artifact that an owner added. Raises ArtifactError when the folder holds no manifest."""
    load_artifact(root / name)
    if Path(name).name != name:
        raise ArtifactError(f"{name!r} is not a plain name")
    shutil.rmtree(root / name)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
