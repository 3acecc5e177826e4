"""Distillation from a teacher's endpoint to a published model, in steps that each resume.

A run is a folder:

    answers.jsonl      the teacher's answers (`teacher`)
    checkpoint.pt      adapter, its average, and optimizer state
    log.jsonl          a line per report; loss.svg plots it
    adapter.gguf       the adapter, for `causeway-models add-adapter`
    importance.npz     the importance matrix of the merged model
    held_back.jsonl    the prompts that were not learned, with their references
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from causeway_server.models.catalog.artifact import (
    Artifact,
    ArtifactError,
    ArtifactNotFound,
    load_artifact,
    save_manifest,
)
from causeway_server.models.comparison.compare import Comparison, Run, compare
from causeway_server.models.comparison.prompts import EvaluationPrompt
from causeway_server.models.publish.add import check_name
from causeway_server.models.publish.publish import publish_gguf
from causeway_server.router.errors import BackendError

from ..calibrate.prompts import AnswerLog
from ..calibrate.report import Target
from ..calibrate.routing_curves import plot
from ..calibrate.run import MIN_PROMPTS, Plan, ask_pair, calibrate_pair
from ..export.activations import importance_of
from ..export.quantize import quantize
from ..publish_signal import card
from .adapter import write_adapter, write_merged
from .examples import ExampleEncoder, agreed, is_held_back, make_examples
from .network import Student
from .teacher import ANSWERS, Teacher, TeacherLog, TeacherSettings, ask_all
from .trainer import LOG, AdapterPlan, AdapterTrainer, Progress

ADAPTER, IMPORTANCE, HELD_BACK, LOSS = "adapter.gguf", "importance.npz", "held_back.jsonl", "loss.svg"
MIN_EXAMPLES = 20  # fewer teach nothing
_IMPORTANCE_TEXTS = 200

Echo = Callable[[str], None]


class DistillPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a run."""

    student: Path
    url: str  # of the teacher's OpenAI endpoint, such as ``https://host/v1``
    teacher: TeacherSettings
    key: str = ""
    run: Path
    to: Path  # folder of models to publish to
    name: str
    quantisation: str
    longest: int  # tokens of a prompt with its answer
    least_agreement: float
    parallel: int
    adapter: AdapterPlan
    command: str


def distill(plan: DistillPlan, prompts: Sequence[EvaluationPrompt], echo: Echo) -> Artifact:
    """Run all steps and return the published model.

    Raises:
        ArtifactError: The teacher cannot be reached, too few of its answers can be learned, a file is not usable, or
            the name is not valid or taken by another command's model.
    """
    published = _published(plan)
    if published is not None:
        echo(f"{published.path} is published already; delete its folder to train again.")
    held = [prompt for prompt in prompts if is_held_back(prompt)]
    learned = [prompt for prompt in prompts if not is_held_back(prompt)]
    with TeacherLog(plan.run / ANSWERS, plan.teacher) as log:
        _ask(plan, prompts, log, echo)
    artifact = published or _train(plan, learned, held, log, echo)
    _calibrate(plan, artifact, [prompt for prompt in held if log.rows[prompt.id].samples], echo)
    return artifact


def _published(plan: DistillPlan) -> Artifact | None:
    """Return the model that an earlier run of this command published; its card was written last.

    Raises:
        ArtifactError: The name is not valid, or taken.
    """
    folder = plan.to / plan.name
    with contextlib.suppress(ArtifactNotFound):
        found = load_artifact(folder)
        if found.manifest.command == plan.command:
            return found if (folder / "README.md").is_file() else None
    check_name(plan.name, plan.to)
    return None


def _train(
    plan: DistillPlan,
    learned: Sequence[EvaluationPrompt],
    held: Sequence[EvaluationPrompt],
    log: TeacherLog,
    echo: Echo,
) -> Artifact:
    """Learn the teacher's answers, and publish the model."""
    with ExampleEncoder(plan.student, plan.longest) as encoder:
        examples, unseen = (make_examples(part, log.rows, encoder, plan.least_agreement) for part in (learned, held))
    refused = sum(not log.rows[prompt.id].samples for prompt in (*learned, *held))
    counts = f"{len(examples)} of {len(learned)} answers are learned"
    echo(f"{counts}; {len(held)} prompts are held back, {refused} were refused.")
    if len(examples) < MIN_EXAMPLES:
        raise ArtifactError(
            f"{log.path}: {len(examples)} answers can be learned, but at least {MIN_EXAMPLES} are needed"
        )
    texts = [f"{one.question} {log.rows[one.id].samples[0].text}" for one in learned if log.rows[one.id].samples]
    references = [_with_reference(prompt, log, plan.least_agreement) for prompt in held]
    (plan.run / HELD_BACK).write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in references))
    student = Student(plan.student, plan.adapter.rank, plan.adapter.first_layer, seed=plan.adapter.seed)
    trainer = AdapterTrainer(student, plan.adapter, plan.run)
    if trainer.resume():
        echo(f"The training resumes at step {trainer.step}.")

    def report(line: Progress) -> None:
        echo(line.text)
        (plan.run / LOSS).write_text(loss_chart(read_progress(plan.run / LOG)), encoding="utf-8")

    trainer.run(examples, unseen, report)
    (plan.run / LOSS).write_text(loss_chart(read_progress(plan.run / LOG)), encoding="utf-8")
    merged = plan.run / "merged.gguf"
    with trainer.averaged():
        write_adapter(student, plan.run / ADAPTER, plan.name)
        write_merged(plan.student, student, merged, plan.name)
    return _publish(plan, merged, texts, references, echo)


def _ask(plan: DistillPlan, prompts: Sequence[EvaluationPrompt], log: TeacherLog, echo: Echo) -> None:
    async def ask() -> None:
        async with Teacher(plan.url, plan.teacher, plan.key) as teacher:
            await ask_all(prompts, teacher, log, parallel=plan.parallel, progress=echo)

    try:
        asyncio.run(ask())
    except BackendError as error:
        count = sum(prompt.id in log.rows for prompt in prompts)
        raise ArtifactError(
            f"{error.message}\n{count} of {len(prompts)} prompts are answered; the answers are in {log.path}. Run the "
            "same command again to resume."
        ) from error


def _with_reference(prompt: EvaluationPrompt, log: TeacherLog, least: float) -> EvaluationPrompt:
    """Return the prompt with the teacher's answer as its reference, if it has none."""
    answer = agreed(prompt, log.rows[prompt.id], least)
    if prompt.answer is not None or answer is None:
        return prompt
    return msgspec.structs.replace(prompt, answer=answer.text.strip(), metric="exact")


def _publish(
    plan: DistillPlan, merged: Path, texts: Sequence[str], held: Sequence[EvaluationPrompt], echo: Echo
) -> Artifact:
    """Quantise the merged model with its importance matrix, compare it with the student, and publish it."""
    quantised = plan.run / "quantised.gguf"
    spread = texts[:: max(1, len(texts) // _IMPORTANCE_TEXTS)]
    matrix = importance_of(merged, spread, threads=plan.adapter.threads)
    np.savez(plan.run / IMPORTANCE, allow_pickle=False, **matrix)
    quantize(merged, quantised, plan.quantisation, importance=plan.run / IMPORTANCE, threads=plan.adapter.threads)
    merged.unlink()
    found = compare(plan.student, quantised, held, Run(threads=plan.adapter.threads)) if held else None
    metrics = {} if found is None else _metrics(found)
    note = (
        f"Distilled from {plan.teacher.model} into {plan.student.name} (rank {plan.adapter.rank}). The figures are of "
        f"{len(held)} prompts that were held back from training."
    )
    artifact = publish_gguf(quantised, plan.name, plan.to, command=plan.command, note=note, mode="move")
    manifest = msgspec.structs.replace(artifact.manifest, metrics=metrics, seed=plan.adapter.seed)
    artifact = save_manifest(manifest, artifact.folder)
    lines = ["## Measured", "", *(f"- {name}: {value:.4g}" for name, value in metrics.items())] if metrics else []
    (artifact.folder / LOSS).write_bytes((plan.run / LOSS).read_bytes())
    (artifact.folder / "README.md").write_text(card(manifest, note, lines), encoding="utf-8")
    for line in lines[2:]:
        echo(line)
    return artifact


def _calibrate(plan: DistillPlan, model: Artifact, held: Sequence[EvaluationPrompt], echo: Echo) -> None:
    """Learn when the model is good enough beside the teacher, on the prompts that were held back."""
    if plan.teacher.system or len(held) < MIN_PROMPTS:
        reason = "a system message makes the teacher another model" if plan.teacher.system else f"{len(held)} prompts"
        echo(f"Not calibrated ({reason}; {MIN_PROMPTS} prompts are needed): see `causeway-models calibrate`.")
        return
    pair = Plan(
        small=model,
        large=plan.teacher.model,
        large_url=plan.url,
        key=plan.key,
        run=plan.run / "calibration",
        to=plan.to,
        name=f"calibrated-{plan.name}",
        command=plan.command,
        target=Target(keep=0.95),
        hold_tokens=24,
        hold_ms=1500,
        parallel=plan.parallel,
        context=2048,
        threads=plan.adapter.threads,
        seed=plan.adapter.seed,
    )
    with AnswerLog(pair.run / ANSWERS, pair.pair) as log:
        ask_pair(pair, held, log, echo)
        calibrate_pair(pair, held, log, echo)


def _metrics(found: Comparison) -> dict[str, float]:
    """Return the accuracy of the student and of the model, and the model's perplexity of the references."""
    figures = {}
    for name, model in (("student", found.first), ("model", found.second)):
        for task, share in model.accuracy.items():
            figures[f"{name}/{task}"] = round(share.value, 4)
        if model.perplexity is not None:
            figures[f"{name}/perplexity"] = round(model.perplexity, 4)
    return figures


def read_progress(path: Path) -> list[Progress]:
    """Read the log of a training."""
    return [msgspec.json.decode(line, type=Progress) for line in path.read_bytes().splitlines()]


def loss_chart(lines: Sequence[Progress]) -> str:
    """Return an SVG plot of the losses: rows to the right, loss upwards."""
    series = {
        "learned": ("#2166ac", [(one.rows, one.loss) for one in lines]),
        "held back": ("#b2182b", [(one.rows, one.held_loss) for one in lines if one.held_loss is not None]),
    }
    rows = max((one.rows for one in lines), default=1)
    highest = max((value for _, points in series.values() for _, value in points), default=1.0) or 1.0
    marks = []
    for number, (name, (colour, points)) in enumerate(series.items()):
        path = " ".join(f"{52 + 490 * x / rows:.1f},{34 + 278 * (1 - y / highest):.1f}" for x, y in points)
        marks.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        marks.append(f'<text x="470" y="{50 + 15 * number}" fill="{colour}">{name}</text>')
    marks += [f'<text x="8" y="38">{highest:.2f}</text>', '<text x="8" y="316">0</text>']
    marks.append(f'<text x="480" y="328">{rows} rows</text>')
    return plot("Loss per token of the answers, by rows learned", *marks)
