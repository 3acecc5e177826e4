"""The answer of a session's response, as a `ClientReply` of the service: chunks become events of the session."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from ...openai import CachedAnswer
from ...realtime import ResponseStream
from ...types import Chunk, Embeddings
from ..reply import Piece

Head = TypeVar("Head")
Speak = Callable[[str], Awaitable[bytes]]
_PIECE_BYTES = 9600  # a fifth of a second


class SessionReply(Generic[Head]):
    """Passes one answer on to a response of a session.

    Args:
        flush: sends the session's new events; waits while the client is far behind.
        describe: returns what `response.done` says of an answer, as the ``x-causeway-*`` headers do over HTTP.
        speak: returns the sound of a text, 16-bit PCM at 24 kHz; None: the answer is text.
    """

    def __init__(
        self,
        response: ResponseStream,
        flush: Callable[[], Awaitable[None]],
        describe: Callable[[Head], dict[str, object]],
        speak: Speak | None = None,
    ) -> None:
        self._response = response
        self._flush = flush
        self._describe = describe
        self._speak = speak

    async def commit(self, head: Head) -> None:
        self._response.commit(self._describe(head))

    async def send(self, piece: Piece) -> None:
        if isinstance(piece, Chunk):
            if piece.tool_calls:
                await self._say(rest=True)
            self._response.chunk(piece)
            await self._say()
            await self._flush()

    @property
    def finished(self) -> bool:
        return self._response.finished

    async def replay(self, head: Head, answer: CachedAnswer | Embeddings) -> None:
        await self.commit(head)
        for chunk in answer.chunks if isinstance(answer, CachedAnswer) else ():
            await self.send(chunk)

    async def end(self) -> None:
        await self._say(rest=True)
        self._response.complete()
        await self._flush()

    async def _say(self, *, rest: bool = False) -> None:
        """Send the sound of whole sentences, or of the rest of the message."""
        if self._speak is None or not (text := self._response.ready_to_speak(rest=rest)):
            return
        sound = await self._speak(text)
        for at in range(0, len(sound), _PIECE_BYTES):
            self._response.audio(sound[at : at + _PIECE_BYTES])
            await self._flush()
