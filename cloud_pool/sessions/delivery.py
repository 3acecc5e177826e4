"""The answer of a session's response: chunks become events of the session."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable

from router.realtime import ResponseStream
from router.types import Chunk

from ..core.request_context import AnswerHead
from ..http.responses import OnChunk

_PREFIX = "x-causeway-"


class SessionDelivery:
    """Passes one answer on to a response of a session.

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

    async def deliver(self, head: AnswerHead, chunks: AsyncGenerator[Chunk, None], on_chunk: OnChunk) -> None:
        """Raises CausewayError: the answer broke."""
        about = {name.removeprefix(_PREFIX).replace("-", "_"): value for name, value in head.headers}
        self._response.commit({"request_id": self._request_id, **about})
        async for chunk in chunks:
            on_chunk(chunk)
            self._response.chunk(chunk)
            await self._flush()
        self._response.complete()
        await self._flush()
