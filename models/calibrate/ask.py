"""What one calibration is of, and asking both of its models the prompts that have no answers yet."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from router.errors import BackendError

from ..catalog.artifact import Artifact, ArtifactError, DataSource
from ..signals.pair import ModelIdentity
from .answers import AnswerLog, Pair, PairAnswers
from .collect import Answerer, EndpointAnswerer, EngineAnswerer, collect
from .evaluate import Target
from .label import chosen_letter
from .prompts import CalibrationPrompt

LEAST_PROMPTS = 50  # fewer tell nothing
_PROGRESS = 25
_QUESTION = """Compare two answers to a request. Judge only whether they are correct and do what was asked for.

Request:
{prompt}

First answer:
{first}

Second answer:
{second}"""
_CHOICES = {"A": "The first answer is better.", "B": "The second answer is better.", "C": "Both are equally good."}

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
    sources: tuple[DataSource, ...] = ()  # what the manifest names: whose the prompts are
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


class AnswerJudge:
    """Asks `model` which answer is better."""

    def __init__(self, model: Answerer) -> None:
        self._model = model

    async def as_good(self, prompt: CalibrationPrompt, answers: PairAnswers) -> bool:
        """Return whether the small model's answer is as good; an unclear judgement counts against it.

        Raises:
            BackendError: the model is gone.
        """
        # Judges prefer one position: half of the prompts, by their digest, have the small model's answer first.
        swapped = int(prompt.id, 16) % 2 == 1
        texts = [answers.small.text, answers.large.text]
        first, second = reversed(texts) if swapped else texts
        question = _QUESTION.format(prompt=prompt.question, first=first, second=second)
        comparison = CalibrationPrompt(prompt=question, metric="choice", answer="A", choices=_CHOICES)
        letter = chosen_letter(await self._model.answer(comparison), list(_CHOICES))
        return letter in ("C", "B" if swapped else "A")
