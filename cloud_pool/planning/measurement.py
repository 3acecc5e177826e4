"""Measure the speed of one replica through an OpenAI endpoint, for `causeway-cloud plan`.

Every prompt begins differently, so that no shared prefix makes prefill look faster than it is, and `ignore_eos` (vLLM's
name, which our engine accepts too) keeps every answer at its full length.
"""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Callable, Sequence

import aiohttp
import anyio
import msgspec

from router.errors import ConfigError

from .capacity import ThroughputPoint

_WORDS = "time light music door alarm kitchen volume timer lamp weather window heating".split()
_LONG_WORDS, _LONG_ANSWER_TOKENS = 160, 64
_ROUNDS = 3
_MIN_TOKEN_S = 1e-9  # no machine is faster
_TIMEOUT = aiohttp.ClientTimeout(total=300)


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int


class _Answer(msgspec.Struct, frozen=True):
    usage: _Usage


class ReplicaMeasurement(msgspec.Struct, frozen=True):
    """`prefill_tokens_per_s` and `overhead_s` are those of the fastest point."""

    prefill_tokens_per_s: float
    decode: tuple[ThroughputPoint, ...]
    overhead_s: float = 0.0


class LoadRun(msgspec.Struct, frozen=True):
    """The result of a closed loop, in which each caller sends its next request as soon as it has its answer."""

    requests: int
    seconds: float
    prompt_tokens: int
    completion_tokens: int


class MeasuredEndpoint:
    """An OpenAI endpoint under measurement; `url` ends in /v1."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, model: str, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._session = session
        self._url = f"{url.rstrip('/')}/chat/completions"
        self._model = model
        self._clock = clock

    async def run(self, sequences: int, requests: int, *, words: int, answer_tokens: int) -> LoadRun:
        """Run `requests` requests with `sequences` callers.

        Raises:
            ConfigError: The endpoint does not answer.
        """
        left = requests
        usages: list[_Usage] = []
        errors: list[ConfigError] = []

        async def caller() -> None:
            nonlocal left
            try:
                while left > 0:
                    left -= 1
                    usages.append(await self._send(words, answer_tokens))
            except ConfigError as error:
                errors.append(error)  # Raised below: a task group would wrap it.
                callers.cancel_scope.cancel()

        began = self._clock()
        async with anyio.create_task_group() as callers:
            for _ in range(sequences):
                callers.start_soon(caller)
        for error in errors:
            raise error
        seconds = self._clock() - began
        return LoadRun(
            len(usages),
            seconds,
            sum(usage.prompt_tokens for usage in usages),
            sum(usage.completion_tokens for usage in usages),
        )

    async def _send(self, words: int, answer_tokens: int) -> _Usage:
        """Raises ConfigError."""
        text = " ".join([secrets.token_hex(4), *(_WORDS[secrets.randbelow(len(_WORDS))] for _ in range(words))])
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": answer_tokens,
            "ignore_eos": True,
        }
        try:
            async with self._session.post(self._url, json=body, timeout=_TIMEOUT) as reply:
                data = await reply.read()
                if reply.status != 200:
                    raise ConfigError(f"{reply.status} {data[:200].decode(errors='replace')}", where=self._url)
                return msgspec.json.decode(data, type=_Answer).usage
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
            raise ConfigError(str(error) or type(error).__name__, where=self._url) from error


async def measure(endpoint: MeasuredEndpoint, sequences: Sequence[int]) -> ReplicaMeasurement:
    """Measure the rates of a replica whose slots are full, for each number of sequences.

    Three mixes are run in turn, three times, so that other work on the machine affects all of them: (a) short
    prompts and short answers, (b) long prompts, (c) long answers. The medians of their times a request are

        time = overhead + prompt tokens / prefill rate + answer tokens / decode rate

    three equations for the three unknowns.

    Raises:
        ConfigError: The endpoint does not answer, or the times do not grow with the lengths.
    """
    await endpoint.run(1, 1, words=1, answer_tokens=1)  # The first request ever pays for loading.
    short, brief = _LONG_WORDS // 4, _LONG_ANSWER_TOKENS // 4
    fits = []
    for count in sequences:
        mixes = ((short, brief), (_LONG_WORDS, brief), (short, _LONG_ANSWER_TOKENS))
        runs: list[list[LoadRun]] = [[] for _ in mixes]
        for _ in range(_ROUNDS):
            for mix_runs, (long, answer) in zip(runs, mixes, strict=True):
                mix_runs.append(await endpoint.run(count, 3 * count, words=long, answer_tokens=answer))
        fits.append(_fitted(count, *(_cost(each) for each in runs)))
    fastest = max(fits, key=lambda fit: fit.decode[0].tokens_per_s)
    return msgspec.structs.replace(fastest, decode=tuple(fit.decode[0] for fit in fits))


class _Cost(msgspec.Struct, frozen=True):
    """Time and tokens of one request of a mix."""

    seconds: float
    prompt: float
    completion: float


def _cost(runs: Sequence[LoadRun]) -> _Cost:
    requests = sum(run.requests for run in runs)
    return _Cost(
        statistics.median(run.seconds / run.requests for run in runs),
        sum(run.prompt_tokens for run in runs) / requests,
        sum(run.completion_tokens for run in runs) / requests,
    )


def _fitted(sequences: int, base: _Cost, long_prompt: _Cost, long_answer: _Cost) -> ReplicaMeasurement:
    """Solve the three equations. Raises ConfigError where the times do not grow with the lengths."""
    prompt_s = (long_prompt.seconds - base.seconds) / max(long_prompt.prompt - base.prompt, 1.0)
    answer_s = (long_answer.seconds - base.seconds) / max(long_answer.completion - base.completion, 1.0)
    if min(prompt_s, answer_s) < _MIN_TOKEN_S:
        raise ConfigError(
            f"with {sequences} sequences longer requests took no longer: measure again on an idle machine"
        )
    overhead_s = max(0.0, base.seconds - base.prompt * prompt_s - base.completion * answer_s)
    return ReplicaMeasurement(1.0 / prompt_s, (ThroughputPoint(sequences, 1.0 / answer_s),), overhead_s)
