"""Clients that hold conversations with a server, and what each of their requests saw."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence

import aiohttp
import msgspec

from .traces import Conversation


class Sample(msgspec.Struct):
    """A request and its times, in seconds after the beginning of the load."""

    due_s: float  # time at which it should have been sent
    sent_s: float = 0.0  # time at which it was sent
    first_s: float | None = None  # Time of the first text. None without an answer.
    ended_s: float = 0.0  # time of the end of the answer or of its failure
    input_tokens: int = 0
    output_tokens: int = 0
    fault: str = ""  # the status or the kind of failure; empty for a whole answer
    route: str = ""  # `x-causeway-route` of the answer


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Message | None = None
    message: _Message | None = None


class _Event(msgspec.Struct):
    choices: tuple[_Choice, ...] = ()
    usage: _Usage | None = None
    error: object = None


class LoadClient:
    """Ask one server.

    Args:
        session: Connections to it, with its base URL, which ends in `/v1/`.
        body: Fields of every request, such as `model`, `max_tokens` and `stream`.
        timeout_s: Time from the sending to the end of an answer; beyond it the request has failed.
        clock: Seconds since the beginning of the load.
    """

    def __init__(
        self, session: aiohttp.ClientSession, body: Mapping[str, object], timeout_s: float, clock: Callable[[], float]
    ) -> None:
        self._session = session
        self._body = body
        self._timeout_s = timeout_s
        self._clock = clock
        self.samples: list[Sample] = []

    async def users(self, count: int, conversations: Iterator[Conversation], seconds: float) -> None:
        """Closed loop: so many users, each with one conversation after the other, until the time is over."""

        async def user() -> None:
            while self._clock() < seconds:
                await self.hold(next(conversations), self._clock(), seconds)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(count):
                tasks.create_task(user())

    async def arrive(self, due: Sequence[tuple[float, Conversation]], seconds: float) -> None:
        """Open loop: each conversation begins when it is due, whatever became of those before."""
        async with asyncio.TaskGroup() as tasks:
            for due_s, conversation in due:
                await asyncio.sleep(due_s - self._clock())
                tasks.create_task(self.hold(conversation, due_s, seconds))

    async def hold(self, conversation: Conversation, due_s: float, until_s: float) -> None:
        """Send the turns; end after a failure, or with the load."""
        messages: list[dict[str, str]] = []
        for turn in conversation.turns:
            messages.append({"role": "user", "content": turn})
            sample = Sample(due_s)
            answer = await self._ask(sample, messages)
            self.samples.append(sample)
            due_s = sample.ended_s + conversation.think_s
            if sample.fault or due_s >= until_s:
                return
            messages.append({"role": "assistant", "content": answer})
            await asyncio.sleep(conversation.think_s)

    async def _ask(self, sample: Sample, messages: Sequence[Mapping[str, str]]) -> str:
        """Ask once, fill the sample, and return the answer's text."""
        sample.sent_s = self._clock()
        text = ""
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._session.post("chat/completions", json={**self._body, "messages": messages}) as response,
            ):
                sample.route = response.headers.get("x-causeway-route", "")
                if response.status != 200:
                    sample.fault = str(response.status)
                    await response.read()
                elif response.content_type == "text/event-stream":
                    text = await self._read_stream(sample, response)
                else:
                    text = self._take(sample, await response.read())
        except TimeoutError:
            sample.fault = "timeout"
        except (aiohttp.ClientError, OSError) as error:
            sample.fault = type(error).__name__
        except msgspec.DecodeError:
            sample.fault = "not OpenAI's format"
        sample.ended_s = self._clock()
        return text

    async def _read_stream(self, sample: Sample, response: aiohttp.ClientResponse) -> str:
        parts, done = [], False
        async for line in response.content:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                done = data == b"[DONE]"
                if not done:
                    parts.append(self._take(sample, data))
        if not done and not sample.fault:
            sample.fault = "cut stream"
        return "".join(parts)

    def _take(self, sample: Sample, data: bytes) -> str:
        """Take one event, or a whole answer; return its text."""
        event = msgspec.json.decode(data, type=_Event)
        if event.error is not None:
            sample.fault = "error event"
        if event.usage is not None:
            sample.input_tokens, sample.output_tokens = event.usage.prompt_tokens, event.usage.completion_tokens
        messages = [choice.delta or choice.message for choice in event.choices]
        text = "".join(message.content or "" for message in messages if message is not None)
        if text and sample.first_s is None:
            sample.first_s = self._clock()
        return text
