"""Collection of answers: ask both models of a pair every prompt, several at a time, and store the answers.

A model runs in an engine child of this process, or is behind any OpenAI endpoint.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, Self

import httpx2
import msgspec

from causeway_server.models.catalog.artifact import Artifact
from causeway_server.models.comparison.prompts import EvaluationPrompt, chosen_letter
from causeway_server.models.llama_cpp.process.parent import EngineProcess
from causeway_server.models.llama_cpp.protocol import Emission, EngineOptions, Prompt, SequenceRequest
from causeway_server.router.errors import BackendError, EngineCrashed
from causeway_server.router.types import Confidence, Message, Sampling, TokenLogprob

from .prompts import AnswerLog, ModelAnswer, PairAnswers

CONFIDENCE_TOKENS = 32  # of an answer's tokens, that confidence is recorded for
ALTERNATIVES = 20
_TRIES = 6  # the pauses between them double from a second on: half a minute in all
_TIMEOUT_S = 300.0
_RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
_QUESTION = """Compare two answers to a request. Judge only whether they are correct and do what was asked for.

Request:
{prompt}

First answer:
{first}

Second answer:
{second}"""
_CHOICES = {"A": "The first answer is better.", "B": "The second answer is better.", "C": "Both are equally good."}


class Answerer(Protocol):
    """Answers prompts with one model."""

    async def answer(self, prompt: EvaluationPrompt) -> ModelAnswer:
        """Answer one prompt, greedily.

        Raises:
            BackendError: The model cannot be reached; a later call may succeed.
        """


async def _is_as_good(prompt: EvaluationPrompt, answers: PairAnswers, judge: Answerer) -> bool:
    """Return whether the small model's answer is as good; an unclear judgement counts against it.

    Raises:
        BackendError: The judge cannot be reached.
    """
    # Judges prefer one position: half of the prompts, by their digest, have the small model's answer first.
    swapped = int(prompt.id, 16) % 2 == 1
    texts = [answers.small.text, answers.large.text]
    first, second = reversed(texts) if swapped else texts
    question = _QUESTION.format(prompt=prompt.question, first=first, second=second)
    comparison = EvaluationPrompt(prompt=question, metric="choice", answer="A", choices=_CHOICES)
    judgement = await judge.answer(comparison)
    letter = chosen_letter(judgement.text, list(_CHOICES), judgement.alternatives)
    return letter in ("C", "B" if swapped else "A")


class EngineAnswerer:
    """A model in an engine child of this process, asked as the daemon asks it. Use as an async context manager."""

    def __init__(self, model: Artifact, *, context_tokens: int, parallel: int, threads: int) -> None:
        self._options = EngineOptions(
            model_path=str(model.path),
            context_tokens=context_tokens,
            sequences=parallel,
            threads=threads,
            refuse_token=model.manifest.refuse_token or "",
        )
        self._calls = model.manifest.answers == "calls"
        self._ids = itertools.count(1)
        self._process: EngineProcess

    async def __aenter__(self) -> Self:
        self._process = EngineProcess(self._options)
        await self._process.start()
        await self._process.ready
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._process.close()

    async def answer(self, prompt: EvaluationPrompt) -> ModelAnswer:
        """See `Answerer`."""
        job = SequenceRequest(
            id=next(self._ids),
            prompt=Prompt(messages=(Message("user", prompt.question),)),
            max_tokens=prompt.answer_tokens,
            sampling=Sampling(temperature=0.0),
            logprobs=ALTERNATIVES if prompt.choices else None,
            confidence_tokens=CONFIDENCE_TOKENS,
            copy_from_prompt=self._calls,
        )
        sink = _AnswerSink()
        self._process.submit([job], sink)
        try:
            return await sink.answer
        finally:
            self._process.cancel([job.id])


class _AnswerSink:
    """Collects the emissions of one job."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[ModelAnswer] = asyncio.get_running_loop().create_future()
        self._text: list[str] = []
        self._confidences: list[Confidence] = []
        self._logprobs: list[TokenLogprob] = []

    def put(self, emissions: list[Emission]) -> None:
        for emission in emissions:
            self._text.append(emission.text)
            self._logprobs += emission.logprobs
            if emission.confidence is not None:
                self._confidences.append(emission.confidence)
            if self.answer.done():
                continue
            if emission.error:
                self.answer.set_exception(BackendError(f"{emission.error}: {emission.detail}", phase="stream"))
            elif emission.finish_reason is not None:
                self.answer.set_result(self._whole(emission))

    def engine_lost(self, reason: str) -> None:
        if not self.answer.done():
            self.answer.set_exception(EngineCrashed(reason, phase="stream"))

    def _whole(self, last: Emission) -> ModelAnswer:
        first = self._logprobs[0].top if self._logprobs else ()
        return ModelAnswer(
            text="".join(self._text),
            tokens=last.completion_tokens,
            finish_reason=str(last.finish_reason),
            confidences=tuple(self._confidences),
            choices=tuple((one.token, one.logprob) for one in first),
        )


async def collect(
    prompts: Sequence[EvaluationPrompt],
    small: Answerer,
    large: Answerer,
    log: AnswerLog,
    *,
    parallel: int,
    judge: Answerer | None = None,
    progress: Callable[[int], None] = lambda count: None,
) -> None:
    """Ask both models each prompt that `log` has no answers to, in order, and append the answers to `log`.

    Args:
        judge: The model that compares answers to prompts without a reference, those in `log` included.
        parallel: The number of prompts that are asked at a time.
        progress: Called with the number of prompts that have answers, after each.

    Raises:
        BackendError: A model cannot be reached. The answers so far are stored, and a second call resumes.
    """

    def judges(prompt: EvaluationPrompt, row: PairAnswers) -> bool:
        return judge is not None and prompt.answer is None and row.judged is None

    def is_done(prompt: EvaluationPrompt) -> bool:
        row = log.rows.get(prompt.id)
        return row is not None and not judges(prompt, row)

    waiting = iter([prompt for prompt in prompts if not is_done(prompt)])

    async def ask() -> None:
        for prompt in waiting:
            row = log.rows.get(prompt.id)
            if row is None:
                answers = await asyncio.gather(small.answer(prompt), large.answer(prompt))
                row = PairAnswers(prompt.id, prompt.task, *answers)
                log.append(row)
            if judge is not None and judges(prompt, row):
                log.append(msgspec.structs.replace(row, judged=await _is_as_good(prompt, row, judge)))
            progress(len(log.rows))

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(parallel):
                group.create_task(ask())
    except BaseExceptionGroup as failed:  # not `except*`: before Python 3.11.4 it wraps what it raises in a group
        gone, others = failed.split(BackendError)
        if gone is None or others is not None:
            raise
        raise gone.exceptions[0] from failed


class EndpointRefused(BackendError):
    """The endpoint does not accept the request; the same request will not succeed later."""


class PromptRefused(EndpointRefused):
    """HTTP 400, 413 or 422: another prompt may be accepted."""


class EndpointAnswerer:
    """`model` at an endpoint such as ``https://host/v1``. Use as an async context manager.

    Args:
        key: The API key, "" for none.
        pause: Sleeps between two tries.
    """

    def __init__(
        self,
        url: str,
        model: str,
        key: str = "",
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
        timeout_s: float = _TIMEOUT_S,
    ) -> None:
        self._url = f"{url.rstrip('/')}/chat/completions"
        self._model = model
        self._pause = pause
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._client = httpx2.AsyncClient(headers=headers, timeout=timeout_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def answer(self, prompt: EvaluationPrompt) -> ModelAnswer:
        """See `Answerer`. A request to an endpoint that is unreachable or overloaded is repeated for half a minute."""
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt.question}],
            "max_tokens": prompt.answer_tokens,
            "temperature": 0,
        }
        return _parse(await self.post(body), self._url)

    async def post(self, body: Mapping[str, object]) -> httpx2.Response:
        """Return the response to a request. Raises BackendError: it is refused, or unreachable for half a minute."""
        fault = ""
        for attempt in range(_TRIES):
            if attempt:
                await self._pause(2.0 ** (attempt - 1))
            try:
                response = await self._client.post(self._url, json=body)
            except httpx2.HTTPError as error:
                fault = f"{type(error).__name__}: {error}"
                continue
            if response.status_code == 200:
                return response
            fault = f"HTTP {response.status_code}: {response.text[:200]}"
            if response.status_code not in _RETRIED:
                refused = PromptRefused if response.status_code in (400, 413, 422) else EndpointRefused
                raise refused(f"{self._url} does not answer: {fault}", phase="connect")
        raise BackendError(f"{self._url} does not answer: {fault}", phase="connect")


def _parse(response: httpx2.Response, url: str) -> ModelAnswer:
    """Return the answer of a response. Raises BackendError if it is not a chat completion."""
    try:
        body: Any = response.json()
        choice = body["choices"][0]
        return ModelAnswer(
            text=choice["message"]["content"] or "",
            tokens=int((body.get("usage") or {}).get("completion_tokens") or 0),
            finish_reason=str(choice["finish_reason"]),
        )
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise BackendError(
            f"{url} sent something other than a chat completion: {response.text[:200]}", phase="stream"
        ) from error
