"""What one replica does, measured through an OpenAI endpoint: the numbers that `causeway-cloud plan` needs.

Prompts begin differently, so that no shared prefix makes prefill look faster than it is, and `ignore_eos` keeps every
answer at its full length (vLLM's name for it, which our engine takes too).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence

import aiohttp
import anyio
import msgspec

from router.errors import ConfigError

from .capacity import Point

_WORDS = "time light music door alarm kitchen volume timer lamp weather window heating".split()
_TIMEOUT = aiohttp.ClientTimeout(total=300)


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int


class _Answer(msgspec.Struct, frozen=True):
    usage: _Usage


class Measured(msgspec.Struct, frozen=True):
    prefill_tokens_per_s: float
    decode: tuple[Point, ...]


class Run(msgspec.Struct, frozen=True):
    """A closed loop: `sequences` callers, each asks again as soon as it is answered."""

    requests: int
    seconds: float
    prompt_tokens: int
    completion_tokens: int


class Endpoint:
    """`url` ends in /v1."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, model: str, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._session = session
        self._url = f"{url.rstrip('/')}/chat/completions"
        self._model = model
        self._clock = clock

    async def run(self, sequences: int, requests: int, *, words: int, answer_tokens: int) -> Run:
        """Prompts of `words` words. Raises ConfigError when the endpoint does not answer."""
        left = requests
        found: list[_Usage] = []

        faults: list[ConfigError] = []

        async def caller() -> None:
            nonlocal left
            try:
                while left > 0:
                    left -= 1
                    found.append(await self._ask(words, answer_tokens))
            except ConfigError as error:
                faults.append(error)  # Raised below: out of a task group it would come wrapped.
                callers.cancel_scope.cancel()

        began = self._clock()
        async with anyio.create_task_group() as callers:
            for _ in range(sequences):
                callers.start_soon(caller)
        for fault in faults:
            raise fault
        seconds = self._clock() - began
        return Run(len(found), seconds, sum(u.prompt_tokens for u in found), sum(u.completion_tokens for u in found))

    async def _ask(self, words: int, answer_tokens: int) -> _Usage:
        """Raises ConfigError."""
        text = " ".join([secrets.token_hex(4), *(_WORDS[secrets.randbelow(len(_WORDS))] for _ in range(words))])
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": answer_tokens,
            "ignore_eos": True,
        }
        try:
            async with self._session.post(self._url, json=body, timeout=_TIMEOUT) as answer:
                data = await answer.read()
                if answer.status != 200:
                    raise ConfigError(f"{answer.status} {data[:200].decode(errors='replace')}", where=self._url)
                return msgspec.json.decode(data, type=_Answer).usage
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
            raise ConfigError(str(error) or type(error).__name__, where=self._url) from error


async def measure(
    endpoint: Endpoint, sequences: Sequence[int], *, words: int = 200, answer_tokens: int = 64, rounds: int = 3
) -> Measured:
    """Raises ConfigError.

    prefill   long prompts with answers of one token: prompt tokens a second
    decode    short prompts with long answers, for each number of sequences; the prompts' own time is taken off
    """
    await endpoint.run(1, 1, words=1, answer_tokens=1)  # the first one ever pays for loading
    most = max(sequences)
    prefill = await endpoint.run(most, most * rounds, words=words, answer_tokens=1)
    rate = prefill.prompt_tokens / prefill.seconds
    points = []
    for count in sequences:
        run = await endpoint.run(count, count * rounds, words=1, answer_tokens=answer_tokens)
        decoding_s = max(run.seconds - run.prompt_tokens / rate, 0.1 * run.seconds)
        points.append(Point(count, run.completion_tokens / decoding_s))
    return Measured(rate, tuple(points))
