"""A calibration run: its settings, the answers of both models, and a published artifact with its report."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from causeway_server.models.catalog.artifact import Artifact, ArtifactError, DataSource, find_signal
from causeway_server.models.comparison.prompts import EvaluationPrompt
from causeway_server.models.signals import SHADOW_FILE as FILE
from causeway_server.models.signals.encoder import SentenceEncoder
from causeway_server.models.signals.pair import ModelIdentity, PairHandoff, PairParameters, find_pair, prompt_features
from causeway_server.router.errors import BackendError

from ..publish_signal import SignalMetadata, publish_signal
from .collect import Answerer, EndpointAnswerer, EngineAnswerer, collect
from .fit import FOLDS, Rows, Unanswered, fit_pair, golden_answers, predict_published, predict_unseen
from .prompts import AnswerLog, LabelledAnswer, Pair, label
from .report import (
    BOTH,
    PROMPT,
    FittedReport,
    Operation,
    PairReport,
    Target,
    calibration_errors,
    choose_threshold,
    evaluate_pair,
    kept_on_device,
    markdown,
    operate,
    signals_of,
    write_report,
)
from .routing_curves import Array64
from .shadow import read_shadow_rows

MIN_PROMPTS = 50  # fewer tell nothing
_PROGRESS = 25

Echo = Callable[[str], None]
STAGES = (1, 2, 4, 8, 16, 24, 32)  # numbers of tokens that a stage is fitted for


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a calibration run."""

    small: Artifact
    large: Artifact | str  # the large model; only a name if it is behind `large_url`
    large_url: str = ""  # an OpenAI endpoint, such as ``https://host/v1``
    judge: str = ""  # the model that compares answers; "" for none
    judge_url: str = ""
    key: str = ""  # the API key of both endpoints
    run: Path  # folder for the answers and the fitted signals
    to: Path  # folder of models in which the artifact is published
    name: str  # name of the artifact
    command: str  # command line, for the manifest
    sources: tuple[DataSource, ...] = ()  # sources of the prompts, for the manifest
    target: Target
    hold_tokens: int
    hold_ms: int
    parallel: int
    context: int  # tokens of one sequence
    threads: int
    seed: int

    @property
    def pair(self) -> Pair:
        """The identities of both models."""
        large = self.large
        identity = ModelIdentity(large) if isinstance(large, str) else ModelIdentity(large.name, large.manifest.sha256)
        return Pair(ModelIdentity(self.small.name, self.small.manifest.sha256), identity)


def ask_pair(plan: Plan, prompts: Sequence[EvaluationPrompt], log: AnswerLog, echo: Echo) -> None:
    """Ask both models all prompts that `log` has no answers to.

    Raises:
        ArtifactError: A model cannot be reached; the answers so far are stored.
    """

    def progress(count: int) -> None:
        if count % _PROGRESS == 0:
            echo(f"{count} of {len(prompts)} prompts answered")

    def answerer(model: Artifact | str, url: str) -> contextlib.AbstractAsyncContextManager[Answerer]:
        if isinstance(model, str):
            return EndpointAnswerer(url, model, plan.key)
        return EngineAnswerer(model, context_tokens=plan.context, parallel=plan.parallel, threads=plan.threads)

    async def ask() -> None:
        async with contextlib.AsyncExitStack() as stack:
            small = await stack.enter_async_context(answerer(plan.small, ""))
            large = await stack.enter_async_context(answerer(plan.large, plan.large_url))
            judge = await stack.enter_async_context(answerer(plan.judge, plan.judge_url)) if plan.judge else None
            await collect(prompts, small, large, log, parallel=plan.parallel, judge=judge, progress=progress)

    if not plan.judge and all(prompt.id in log.rows for prompt in prompts):
        return
    if len(prompts) < MIN_PROMPTS:
        echo(f"Asking {len(prompts)} prompts; the answers are stored. A fit needs at least {MIN_PROMPTS}.")
    try:
        asyncio.run(ask())
    except BackendError as error:
        raise ArtifactError(f"{error.message}\n{_kept(prompts, log)}") from error
    except KeyboardInterrupt:
        echo(_kept(prompts, log))
        raise


def _kept(prompts: Sequence[EvaluationPrompt], log: AnswerLog) -> str:
    return (
        f"{len(log.rows)} of {len(prompts)} prompts are answered; the answers are in {log.path}. Run the "
        "same command again to resume."
    )


def calibrate_pair(plan: Plan, prompts: Sequence[EvaluationPrompt], log: AnswerLog, echo: Echo) -> Artifact | None:
    """Fit on the answers in `log`, write the report, and publish the signals.

    Returns:
        The artifact, or None if there is nothing to route on these prompts; the report says so.

    Raises:
        ArtifactError: Too few prompts are answered.
    """
    encoder_artifact = find_signal("embedding", None, (plan.to,))
    rows = _answered(prompts, log, encoder_artifact)
    tokens = sorted({*(count for count in STAGES if count < plan.hold_tokens), plan.hold_tokens})
    return _fit_and_publish(plan, rows, tokens, encoder_artifact, echo)


def check_pair(
    plan: Plan, prompts: Sequence[EvaluationPrompt], log: AnswerLog, dirs: Sequence[Path], echo: Echo
) -> None:
    """Measure the published signals of the pair on the answers in `log`; the report goes to the run's folder.

    Args:
        dirs: Folders of artifacts that take precedence over the shipped ones.

    Raises:
        ArtifactError: Nothing is published for these weights, or too few prompts are answered.
    """
    published = find_pair(plan.small, [plan.pair.large.name], dirs).parameters
    rows = _answered(prompts, log, find_signal("embedding", None, dirs))
    unseen, handoff = predict_published(published, rows), published.handoff
    signals = signals_of(rows, unseen, published.stages[-1].tokens)
    operation = None if handoff is None else operate(rows, signals[BOTH] >= handoff.below, plan.seed)
    report = _report(plan, rows, signals, handoff, operation)
    write_report(plan.run, report, rows, signals)
    echo(f"{markdown(report)}\nThe report is in {plan.run}.")


def calibrate_from_shadow(plan: Plan, state_dir: Path, echo: Echo) -> Artifact | None:
    """Fit on the shadow answers in a daemon's state folder, write the report, and publish the signals.

    Returns:
        The artifact or None, as for `calibrate_pair`.

    Raises:
        ArtifactError: There are too few shadow answers of this pair.
    """
    encoder_artifact = find_signal("embedding", None, (plan.to,))
    rows, after = read_shadow_rows(state_dir, plan.pair, encoder_artifact.manifest.sha256)
    _check_count(len(rows), state_dir / FILE)
    plan = msgspec.structs.replace(plan, hold_tokens=after)
    return _fit_and_publish(plan, rows, [after], encoder_artifact, echo)


def _check_count(count: int, path: Path) -> None:
    if count < MIN_PROMPTS:
        raise ArtifactError(f"{path}: {count} prompts are answered, but a fit needs at least {MIN_PROMPTS}")


def _answered(prompts: Sequence[EvaluationPrompt], log: AnswerLog, encoder_artifact: Artifact) -> Rows:
    """Raise ArtifactError if too few prompts are answered."""
    encoder = SentenceEncoder(encoder_artifact.path)
    answers = label(prompts, log.rows, encoder)
    _check_count(len(answers), log.path)
    return as_rows(answers, encoder, [prompt for prompt in prompts if prompt.id not in log.rows])


def _fit_and_publish(
    plan: Plan, rows: Rows, tokens: Sequence[int], encoder_artifact: Artifact, echo: Echo
) -> Artifact | None:
    echo(f"Fitting on {len(rows)} prompts, and {FOLDS} times on parts of them to measure the result.")
    fitted = fit_pair(rows, tokens, plan.seed)
    unseen = predict_unseen(rows, tokens, plan.seed)
    signals = signals_of(rows, unseen, tokens[-1])
    below, prompt_below = (
        round(choose_threshold(known, rows.small, rows.large, plan.target, rows.weights), 3)
        for known in (fitted.stages_unseen[-1], fitted.quality_unseen)
    )
    operation, prompt_alone = (
        operate(rows, kept_on_device(rows, unseen, stage, plan.target), plan.seed) for stage in (-1, None)
    )
    handoff = PairHandoff(plan.hold_tokens, below, plan.hold_ms)
    shown = FittedReport(plan.target, prompt_below, prompt_alone)
    report = _report(plan, rows, signals, handoff, operation, shown)
    folder = plan.to / plan.name
    write_report(folder, report, rows, signals)
    echo(markdown(report))
    if report.nothing_to_route:
        echo(f"The report is in {folder}.")
        return None
    parameters = PairParameters(
        plan.pair.small,
        plan.pair.large,
        encoder_artifact.manifest.sha256,
        fitted.quality,
        fitted.stages,
        report.handoff,
        fitted.kinds,
        golden_answers(rows, unseen, fitted.kinds, plan.seed),
    )
    weights = plan.run / "signals.json"
    weights.write_bytes(msgspec.json.format(msgspec.json.encode(parameters), indent=1))
    metadata, appendix = _metadata(plan, report), markdown(report).splitlines()
    return publish_signal(weights, plan.name, plan.to, metadata, judged=plan.small, appendix=appendix)


def as_rows(
    answers: Sequence[LabelledAnswer], encoder: SentenceEncoder, unanswered: Sequence[EvaluationPrompt] = ()
) -> Rows:
    """Return labelled answers as arrays, together with the prompts that have no answers."""

    def inputs(texts: Iterable[str]) -> Array64:
        return np.array([prompt_features(text, encoder) for text in texts])

    return Rows(
        answers,
        inputs(one.text for one in answers),
        np.array([one.small for one in answers]),
        np.array([one.large for one in answers]),
        Unanswered([one.task for one in unanswered], inputs(one.question for one in unanswered))
        if unanswered
        else None,
    )


def _report(
    plan: Plan,
    rows: Rows,
    signals: Mapping[str, Array64],
    handoff: PairHandoff | None,
    operation: Operation | None,
    fitted: FittedReport | None = None,
) -> PairReport:
    return PairReport(
        small=plan.pair.small.name,
        large=plan.pair.large.name,
        weighted=not np.allclose(rows.weights, 1.0),
        tasks=evaluate_pair(rows, signals, plan.seed),
        errors=calibration_errors(rows, signals),
        handoff=handoff,
        operation=operation,
        fitted=fitted,
    )


def _metadata(plan: Plan, report: PairReport) -> SignalMetadata:
    whole = report.tasks[0]
    figures = {"rows": float(whole.rows), "small": whole.small, "large": whole.large}
    for signal in (BOTH, PROMPT):
        if (found := whole.recovered[signal]) is not None:
            figures[f"apgr/{signal}"] = found.value
        figures[f"ece/{signal}"] = report.errors[signal]
    return SignalMetadata(
        kind="pair",
        architecture="logistic regressions over the encoder's vector, structure of the prompt, and confidence",
        quantisation="JSON numbers",
        command=plan.command,
        note=f"This signal estimates the probability that {plan.pair.small.name} answers as well as "
        f"{plan.pair.large.name}.",
        metrics=figures,
        seed=plan.seed,
        data=plan.sources,
    )
