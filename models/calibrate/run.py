"""One calibration, from prompts to a published artifact with its report."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from router.errors import BackendError

from ..catalog.artifact import Artifact, ArtifactError
from ..publish.publish import SignalMetadata, publish_signal
from ..signals.encoder import SentenceEncoder
from ..signals.lookup import find_signal
from ..signals.pair import ModelIdentity, PairHandoff, PairParameters, prompt_features
from ..train.signals.optimizers import Array64
from .answers import AnswerLog, Pair
from .collect import Answerer, EngineAnswerer, collect
from .endpoint import EndpointAnswerer
from .evaluate import BOTH, PROMPT, Target, calibration_errors, choose_threshold, evaluate_pair, operate, signals_of
from .fit import FOLDS, PairFit, Rows, Unanswered, fit_pair, predict_unseen
from .judge import AnswerJudge
from .label import LabelledAnswer, label
from .prompts import CalibrationPrompt
from .report import PairReport, markdown, write_report
from .shadow import FILE, read_shadow_rows

STAGES = (1, 2, 4, 8, 16, 24, 32)  # numbers of tokens that a stage is fitted for
LEAST_PROMPTS = 50  # fewer tell nothing
_PROGRESS = 25

Echo = Callable[[str], None]


class Endpoint(msgspec.Struct, frozen=True):
    """An OpenAI endpoint, such as ``https://host/v1``."""

    url: str
    key: str = ""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to calibrate, and how."""

    small: Artifact
    large: Artifact | str  # a name: the model is behind `endpoint`
    endpoint: Endpoint | None = None
    judge: tuple[str, Endpoint] | None = None  # model, and where it is
    run: Path  # folder of the answers, and of the fitted signals
    target: Target
    hold_tokens: int
    hold_ms: int
    parallel: int
    context_tokens: int
    threads: int
    seed: int

    @property
    def pair(self) -> Pair:
        """The identity of both models."""
        large = self.large
        identity = ModelIdentity(large) if isinstance(large, str) else ModelIdentity(large.name, large.manifest.sha256)
        return Pair(ModelIdentity(self.small.name, self.small.manifest.sha256), identity)


def ask_pair(plan: Plan, prompts: Sequence[CalibrationPrompt], log: AnswerLog, echo: Echo) -> None:
    """Ask both models all prompts that `log` has no answers to.

    Raises:
        ArtifactError: a model is gone; what was answered is kept.
    """

    def progress(count: int) -> None:
        if count % _PROGRESS == 0:
            echo(f"{count} of {len(prompts)} prompts answered")

    def engine(model: Artifact) -> EngineAnswerer:
        return EngineAnswerer(model, context_tokens=plan.context_tokens, parallel=plan.parallel, threads=plan.threads)

    async def ask() -> None:
        async with contextlib.AsyncExitStack() as stack:
            small = await stack.enter_async_context(engine(plan.small))
            large: Answerer
            if isinstance(plan.large, str):
                assert plan.endpoint is not None
                large = await stack.enter_async_context(
                    EndpointAnswerer(plan.endpoint.url, plan.large, plan.endpoint.key)
                )
            else:
                large = await stack.enter_async_context(engine(plan.large))
            judge = None
            if plan.judge is not None:
                model, at = plan.judge
                judge = AnswerJudge(await stack.enter_async_context(EndpointAnswerer(at.url, model, at.key)))
            await collect(prompts, small, large, log, parallel=plan.parallel, judge=judge, progress=progress)

    if plan.judge is None and all(prompt.id in log.rows for prompt in prompts):
        return
    if len(prompts) < LEAST_PROMPTS:
        echo(f"asking {len(prompts)} prompts, whose answers are kept; a fit needs at least {LEAST_PROMPTS}")
    try:
        asyncio.run(ask())
    except BackendError as error:
        raise ArtifactError(f"{error.message}\n{_kept(prompts, log)}") from error
    except KeyboardInterrupt:
        echo(_kept(prompts, log))
        raise


def _kept(prompts: Sequence[CalibrationPrompt], log: AnswerLog) -> str:
    return (
        f"{len(log.rows)} of {len(prompts)} prompts are answered and kept in {log.path}. "
        "Run the same command again to go on."
    )


def calibrate_pair(
    plan: Plan, prompts: Sequence[CalibrationPrompt], log: AnswerLog, to: Path, name: str, command: str, echo: Echo
) -> Artifact | None:
    """Fit on the answers in `log`, write the report, and publish the signals.

    Returns:
        The artifact, or None where there is nothing to route on these prompts; the report says so.

    Raises:
        ArtifactError: too few prompts are answered.
    """
    encoder_artifact = find_signal("embedding", None, (to,))
    encoder = SentenceEncoder(encoder_artifact.path)
    answers = label(prompts, log.rows, encoder)
    _check_count(len(answers), log.path)
    rows = as_rows(answers, encoder, [prompt for prompt in prompts if prompt.id not in log.rows])
    tokens = sorted({*(count for count in STAGES if count < plan.hold_tokens), plan.hold_tokens})
    return _fit_and_publish(plan, rows, tokens, encoder_artifact, to, name, command, echo)


def calibrate_from_shadow(
    plan: Plan, state_dir: Path, to: Path, name: str, command: str, echo: Echo
) -> Artifact | None:
    """Fit on the shadow answers in a daemon's state folder, write the report, and publish the signals.

    Returns:
        As `calibrate_pair`.

    Raises:
        ArtifactError: too few shadow answers of this pair are there.
    """
    encoder_artifact = find_signal("embedding", None, (to,))
    rows, after = read_shadow_rows(state_dir, plan.pair, encoder_artifact.manifest.sha256)
    _check_count(len(rows), state_dir / FILE)
    plan = msgspec.structs.replace(plan, hold_tokens=after)
    return _fit_and_publish(plan, rows, [after], encoder_artifact, to, name, command, echo)


def _check_count(count: int, path: Path) -> None:
    if count < LEAST_PROMPTS:
        raise ArtifactError(f"{path}: {count} prompts are answered; {LEAST_PROMPTS} are the least to fit on")


def _fit_and_publish(
    plan: Plan,
    rows: Rows,
    tokens: Sequence[int],
    encoder_artifact: Artifact,
    to: Path,
    name: str,
    command: str,
    echo: Echo,
) -> Artifact | None:
    fitted, report, signals = _measure(plan, rows, tokens, echo)
    folder = to / name
    write_report(folder, report, rows, signals)
    echo(markdown(report))
    if report.nothing_to_route:
        echo(f"the report is in {folder}")
        return None
    parameters = PairParameters(
        plan.pair.small,
        plan.pair.large,
        encoder_artifact.manifest.sha256,
        fitted.quality,
        fitted.stages,
        PairHandoff(plan.hold_tokens, round(report.handoff.below, 3), plan.hold_ms),
        fitted.kinds,
    )
    weights = plan.run / "signals.json"
    weights.write_bytes(msgspec.json.format(msgspec.json.encode(parameters), indent=1))
    return publish_signal(
        weights, name, to, _metadata(plan, report, command), judged=plan.small, appendix=markdown(report).splitlines()
    )


def as_rows(
    answers: Sequence[LabelledAnswer], encoder: SentenceEncoder, unanswered: Sequence[CalibrationPrompt] = ()
) -> Rows:
    """Return labelled answers as arrays, beside the prompts that have none."""

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


def _measure(
    plan: Plan, rows: Rows, tokens: Sequence[int], echo: Echo
) -> tuple[PairFit, PairReport, dict[str, Array64]]:
    echo(f"fitting on {len(rows)} prompts, and {FOLDS} times on a part of them to measure")
    fitted = fit_pair(rows, tokens, plan.seed)
    unseen = predict_unseen(rows, tokens, plan.seed)
    last = len(tokens) - 1
    thresholds = [
        choose_threshold(known, rows.small, rows.large, plan.target, rows.weights)
        for known in (fitted.stages_unseen[last], fitted.quality_unseen)
    ]
    report = PairReport(
        small=plan.pair.small,
        large=plan.pair.large,
        tokens=plan.hold_tokens,
        hold_ms=plan.hold_ms,
        target=plan.target,
        weighted=not np.allclose(rows.weights, 1.0),
        tasks=evaluate_pair(rows, unseen, last, plan.seed),
        errors=calibration_errors(rows, unseen, last),
        handoff=operate(rows, unseen, last, plan.target, thresholds[0], plan.seed),
        prompt_alone=operate(rows, unseen, None, plan.target, thresholds[1], plan.seed),
    )
    return fitted, report, signals_of(rows, unseen, last)


def _metadata(plan: Plan, report: PairReport, command: str) -> SignalMetadata:
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
        command=command,
        note=f"Estimates the probability that {plan.pair.small.name} answers as well as {plan.pair.large.name}.",
        metrics=figures,
        seed=plan.seed,
        data=(),
    )
