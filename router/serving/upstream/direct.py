"""An answer in callbacks: from a server's response to its client's connection, without a task.

Whatever the callbacks do not know is handed over: a task awaits the same response, and goes on from any byte.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Protocol

from ...errors import CausewayError
from ...types import Chunk
from ..http_client import ChunkTaker, HttpResponse
from ..logs import redacted
from ..request import PlainRequest
from ..responses import HttpReplyWriter, TextExchange
from .server import StreamReader

log = logging.getLogger(__name__)


class DirectConnection(Protocol):
    """The client's connection."""

    writing_paused: bool
    transport: asyncio.Transport | None

    def answered(self, http: PlainRequest, /) -> None:
        """Continue after an answer in callbacks, which was written."""
        ...

    def hand_over(self, http: PlainRequest, /) -> asyncio.Task[None]:
        """Let a task answer the request."""
        ...


class DirectResponse:
    """An answer that is waiting for its server (`ResponseOwner`, `DirectWork`). `http.begun` keeps it."""

    __slots__ = ("_connection", "_exchange", "_http", "_reader", "_reply", "_response")
    _response: HttpResponse

    def __init__(self, http: PlainRequest, connection: DirectConnection) -> None:
        self._http, self._connection = http, connection

    def cancel(self) -> None:
        task = self._hand_over()
        # Its first step takes over the response, and only then can it tell why it ends.
        asyncio.get_running_loop().call_soon(task.cancel)

    def changed(self) -> None:
        response = self._response
        try:
            if not self._advance(response):
                self._hand_over()
        except Exception as failure:
            if not isinstance(failure, CausewayError):  # one of ours is raised again in the task
                log.error("An answer on the fast path failed unexpectedly: %s", redacted(failure))
            if response.owner is self:
                self._hand_over()

    def _own(self, response: HttpResponse) -> None:
        """Take what comes of a response that was just begun."""
        self._response = response
        self._http.begun = response.owner = self

    def _disown(self) -> None:
        """End: a cycle would keep the bodies until the next collection."""
        self._http.begun = self._response.owner = None

    def _hand_over(self) -> asyncio.Task[None]:
        self._response.owner = None
        self._response.offer_chunks(None)
        return self._connection.hand_over(self._http)

    @property
    def _takes_bytes(self) -> bool:
        """Whether the client is there, and reads."""
        transport = self._connection.transport
        return transport is not None and not transport.is_closing() and not self._connection.writing_paused

    def _advance(self, response: HttpResponse) -> bool:
        """Send what has arrived, or wait for it; return False if a task must go on."""
        raise NotImplementedError


class DirectStreaming(DirectResponse):
    """An answer that is read as a stream. Text alone goes from connection to connection (`TextExchange`)."""

    __slots__ = ()
    _reader: StreamReader | None
    _exchange: TextExchange | None  # has the chunks that fit the template first
    _reply: HttpReplyWriter[Any]

    def changed(self) -> None:
        self._settle()
        self._reply.flush(holds=True)
        super().changed()
        self._reply.flush()
        if self._exchange is not None and self._reader is not None:
            self._exchange.left_bytes = self._reader.left_bytes

    def _advance(self, response: HttpResponse) -> bool:
        reader = self._reader
        if response.error is not None or not self._takes_bytes:
            return False
        if reader is None:
            if response.status != 200 or response.is_encoded:
                return False
            reader = self._reader = self._new_reader(response)
        try:
            self._send(reader.feed())
        except Exception as failure:
            reader.fail(failure)  # not all of them were sent
            raise
        if reader.done:
            return self._end(reader)
        template = reader.text_template
        exchange = None if template is None else self._reply.exchange(template)
        if exchange is not self._exchange:
            self._exchange = exchange
            response.offer_chunks(None if exchange is None else self._taker(exchange))
        return reader.is_usual and not response.complete and not self._connection.writing_paused

    def _settle(self) -> None:
        """Count what the exchange has passed on."""
        exchange, reader = self._exchange, self._reader
        if exchange is not None and exchange.tokens and reader is not None:
            self._count(exchange.tokens)
            reader.left_bytes = exchange.left_bytes
            self._reply.count(exchange)

    def _taker(self, exchange: TextExchange) -> ChunkTaker:
        """Return what takes the chunks of text alone."""
        return exchange.take

    def _new_reader(self, response: HttpResponse) -> StreamReader:
        """Return the reader of a good answer, whose head has arrived."""
        raise NotImplementedError

    def _send(self, chunks: Sequence[Chunk]) -> None:
        """Pass chunks on. Raises ClientGone."""
        raise NotImplementedError

    def _count(self, tokens: int) -> None:
        """Count tokens that the exchange has passed on."""
        raise NotImplementedError

    def _end(self, reader: StreamReader) -> bool:
        """Send the end, and record the answer; return False, and do nothing, if the answer is not whole."""
        raise NotImplementedError
