"""Publish weights as an artifact: weights, manifest and card in one folder. The weights are activated by rename."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from router.types import Transcripts

from ..catalog.artifact import (
    Answers,
    Artifact,
    DataSource,
    Manifest,
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
from .placing import Placing, place

LICENCE = "Apache-2.0"
ATTRIBUTIONS = (
    DataSource("HWU64", "CC BY 4.0", "Liu et al. 2019, xliuhw/NLU-Evaluation-Data"),
    DataSource("SNIPS 2017", "CC0 1.0", "Coucke et al. 2018, sonos/nlu-benchmark"),
    DataSource("CLINC150", "CC BY 3.0", "Larson et al. 2019, clinc/oos-eval"),
    DataSource("BANKING77", "CC BY 4.0", "Casanueva et al. 2020, PolyAI-LDN/task-specific-datasets"),
    DataSource("MMLU questions", "MIT", "Hendrycks et al. 2021; only as questions to refuse"),
    DataSource("GSM8K questions", "MIT", "Cobbe et al. 2021; only as questions to refuse"),
)


class SignalMetadata(msgspec.Struct, frozen=True):
    """Manifest fields of a signal that its file does not hold."""

    kind: SignalKind | Literal[""]  # "": a picture encoder, which computes no signal
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
    transcripts: Transcripts = "written",
    placing: Placing = "copy",
) -> Artifact:
    """Place `weights` at `root/name/model.gguf`, write a manifest from the file's metadata, and verify the result.

    Args:
        placing: how the weights get there, see `place`.
        licence: defaults to the licence that the file names, else "unknown".
        temperature: the default where a request names none; None is OpenAI's 1.
        answer_tokens: the default limit of an answer; 0 is the rest of the context.

    Raises:
        ArtifactError: the file is not a readable GGUF, or cannot be placed.
    """
    gguf = read_gguf(weights)
    folder = root / name
    partial = place(weights, folder / "model.gguf.partial", placing)
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
        data=data,
        metrics=dict(metrics or {}),
        parameters=gguf.parameters,
        refuse_token=gguf.refuse_token,
        tokenizer_sha256=gguf.tokenizer_sha256,
        chat_template_sha256=_hash(gguf.chat_template) if gguf.chat_template else None,
        temperature=temperature,
        answer_tokens=answer_tokens,
        answers=answers,
        transcripts=transcripts,
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
    teachers: tuple[DataSource, ...] = (),
) -> Artifact:
    """Publish one of the assistants trained here.

    Args:
        report: the output of `evaluate --json`; its figures go into the manifest and the card.
        teachers: pretrained models to attribute beside the training data.
    """
    reports = msgspec.json.decode(report.read_bytes(), type=list[EvaluationReport]) if report else []
    reports = [one for one in reports if one.model == name] or reports
    metrics = {key: value for one in reports for key, value in one.metrics("grammar/" if one.grammar else "").items()}
    artifact = publish_gguf(
        weights,
        name,
        root,
        data=(*ATTRIBUTIONS, *teachers),
        metrics=metrics,
        command=command,
        licence=LICENCE,
        seed=seed,
        note=note,
        catalog_sha256=sha256_of(CATALOG),
        # A call is either correct or not: default to the likeliest one. No call is longer than ANSWER_TOKENS.
        temperature=0.0,
        answer_tokens=ANSWER_TOKENS,
        answers="calls",
        transcripts="spoken",
    )
    write_card(artifact)
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
        judged: the artifact whose outputs the signal was trained on; the signal is used with exactly that version.
        appendix: lines of Markdown at the end of the card.
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
    write_card(artifact, appendix)
    return artifact


def write_card(artifact: Artifact, appendix: Sequence[str] = ()) -> None:
    """Write the model card beside the weights, from the manifest alone. `appendix`: lines of Markdown at its end."""
    (artifact.folder / "README.md").write_text(card(artifact.manifest, appendix), encoding="utf-8")


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
