"""The answer of a session's response: chunks become events of the session."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from router.realtime import ResponseStream
from router.serving.reply import Piece
from router.types import Chunk

from ..core.request_context import AnswerHead

_PREFIX = "x-causeway-"


class ResponseReply:
    """Passes one answer on to a response of a session (`ClientReply`).

    Args:
        flush: sends the session's new events; waits while the client is far behind.
        request_id: of the request that the response is.
    """

    def __init__(self, response: ResponseStream, flush: Callable[[], Awaitable[None]], request_id: str) -> None:
        self._response = response
        self._flush = flush
        self._request_id = request_id

    @property
    def finished(self) -> bool:
        return self._response.finished

    async def commit(self, head: AnswerHead) -> None:
        about = {name.removeprefix(_PREFIX).replace("-", "_"): value for name, value in head.headers}
        self._response.commit({"request_id": self._request_id, **about})

    async def send(self, piece: Piece) -> None:
        if isinstance(piece, Chunk):
            self._response.chunk(piece)
            await self._flush()

    async def end(self) -> None:
        self._response.complete()
        await self._flush()
