"""Conversion of Chunks to OutputChunks, and their delivery to the client of one call.

While a client does not read, gRPC holds one write back, and accepts no status before it. So the writer outlives the
answer: the producer learns soon that the client has left, and the call ends with the last write.

A write costs as much as ten streamed tokens over HTTP, so texts that arrive during a write are sent together.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
from grpc import aio

from causeway_server.router.errors import ClientGone, StreamBroken
from causeway_server.router.openai.answer import has_content
from causeway_server.router.serving.reply import Piece
from causeway_server.router.types import Chunk, TokenAlternative, TokenLogprob, Usage

from ..core.request_context import AnswerHead, RequestContext
from .messages import Delta, Head, OutputChunk, TokenLogprobs, ToolCall, UsageReport

_PREFIX = "x-causeway-"
_MAX_WAITING = 8
_MAX_CHARACTERS = 1024  # of texts that leave together
_TEXT = {"index", "text"}


class OutputEncoder:
    """Encodes an answer with `choices` choices: call `chunk` for each chunk, then `end`."""

    def __init__(self, choices: int) -> None:
        self._choices = choices
        self._ended: set[int] = set()
        self._tokens = 0
        self._usage: Usage | None = None

    @property
    def finished(self) -> bool:
        """Whether every choice has its finish reason, so that only the usage may follow."""
        return len(self._ended) == self._choices

    def chunk(self, chunk: Chunk) -> Any:
        """Return the OutputChunk of a chunk; None if it holds nothing for the client."""
        self._tokens += chunk.tokens
        if chunk.usage is not None:
            self._usage = chunk.usage
        if chunk.finish_reason is not None:
            self._ended.add(chunk.index)
        return OutputChunk(delta=_delta(chunk)) if has_content(chunk) else None

    def end(self) -> Any:
        """Return the OutputChunk of the usage. Raises StreamBroken if a choice has no end."""
        if not self.finished:
            raise StreamBroken("The answer stopped before its end. Send the request again.", phase="stream")
        usage = self._usage or Usage(completion_tokens=self._tokens)  # our own count where none was reported
        return OutputChunk(
            usage=UsageReport(
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                cached_tokens=usage.cached_tokens,
                reasoning_tokens=usage.reasoning_tokens,
            )
        )


class CallReply:
    """The reply to one call (`ClientReply`)."""

    def __init__(self, call: Any, outbox: Outbox, context: RequestContext) -> None:
        self._call = call
        self._outbox = outbox
        self._id = context.id
        self._encoder = OutputEncoder(context.request.sequences)

    @property
    def finished(self) -> bool:
        return self._encoder.finished

    async def commit(self, head: AnswerHead) -> None:
        """Commit to the answer's head. Raises ClientGone."""
        try:
            await self._call.send_initial_metadata((("x-request-id", self._id), *head.headers))
        except aio.BaseError as error:
            raise ClientGone("The client has left.") from error
        await self._outbox.put(OutputChunk(head=_head(self._id, head)))

    async def send(self, piece: Piece) -> None:
        """Send a piece. Raises ClientGone."""
        if isinstance(piece, Chunk) and (output := self._encoder.chunk(piece)) is not None:
            await self._outbox.put(output)

    async def end(self) -> None:
        """End the answer. Raises StreamBroken if it stopped before its end, or ClientGone."""
        await self._outbox.put(self._encoder.end())
        await self._outbox.flush()


def _head(request_id: str, head: AnswerHead) -> Any:
    about = {name.removeprefix(_PREFIX): value for name, value in head.headers}
    return Head(
        request_id=request_id,
        tier=head.model,
        reason=about.get("tier-reason", ""),
        degraded=about.get("degraded") == "true",
        cache=about.get("cache", ""),
    )


def _delta(chunk: Chunk) -> Any:
    delta = Delta(index=chunk.index, text=chunk.text, finish_reason=chunk.finish_reason)
    if chunk.tool_calls:
        delta.tool_calls.extend(
            ToolCall(index=call.index, id=call.id, name=call.name, arguments=call.arguments)
            for call in chunk.tool_calls
        )
    if chunk.reasoning:
        delta.reasoning = chunk.reasoning
    if chunk.refusal is not None:
        delta.refusal = chunk.refusal
    if chunk.logprobs:
        delta.logprobs.extend(map(_logprob, chunk.logprobs))
    return delta


def _logprob(token: TokenLogprob | TokenAlternative) -> Any:
    raw = None if token.bytes is None else bytes(token.bytes)
    top = [_logprob(alternative) for alternative in token.top] if isinstance(token, TokenLogprob) else ()
    return TokenLogprobs(token=token.token, logprob=token.logprob, bytes=raw, top=top)


class Outbox(msgspec.Struct):
    """The queue of messages for one call, and their writes."""

    call: Any  # context of the call in gRPC
    stalled_s: float  # time without a read after which a client counts as gone, seconds
    waiting: deque[Any] = msgspec.field(default_factory=deque)
    added: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    taken: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    closed: bool = False
    broken: bool = False

    async def run(self) -> None:
        """Write the messages; return after `close`, when all are written or the client has left."""
        try:
            while True:
                while self.waiting:
                    await self.call.write(self.waiting[0])
                    self.waiting.popleft()
                    self.taken.set()
                if self.closed:
                    return
                self.added.clear()
                await self.added.wait()
        except aio.BaseError:
            self.broken = True
            self.taken.set()

    async def put(self, message: Any) -> None:
        """Add a message, waiting while the client is behind. Raises ClientGone."""
        # The first one may be under way.
        if len(self.waiting) < 2 or not _joined(self.waiting[-1], message):
            self.waiting.append(message)
        self.added.set()
        await self._until(lambda: len(self.waiting) < _MAX_WAITING)

    async def flush(self) -> None:
        """Wait until gRPC has taken every message. Raises ClientGone."""
        await self._until(lambda: not self.waiting)

    def close(self) -> None:
        """Let `run` end after the messages that were queued so far."""
        self.closed = True
        self.added.set()

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds() or self.broken:
            if self.broken:
                raise ClientGone("The client has left.")
            self.taken.clear()
            try:
                async with asyncio.timeout(self.stalled_s):
                    await self.taken.wait()
            except TimeoutError:
                raise ClientGone("The client has stopped reading.") from None


def _joined(before: Any, after: Any) -> bool:
    """Append a Delta to the previous one if both are texts of the same choice; return whether it was appended."""
    first, second = before.delta, after.delta
    if not _fields(before) == {"delta"} == _fields(after) or first.index != second.index:
        return False
    if _fields(first) - _TEXT or _fields(second) - _TEXT or len(first.text) > _MAX_CHARACTERS:
        return False
    first.text += second.text
    return True


def _fields(message: Any) -> set[str]:
    return {field.name for field, _ in message.ListFields()}
