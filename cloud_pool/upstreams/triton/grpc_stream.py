"""One gRPC call: the request is sent, and a task that is never cancelled reads the messages.

grpc.aio frees what a read has received only if the read is awaited to its end: the message of a cancelled read stays in
memory for ever, with the 30 KB of receive buffer that it lies in (grpc issue 43360). So a reader that leaves cancels
the call and not the read; the reads then end by themselves.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import grpc
from tritonclient.grpc import service_pb2

_CONNECT_FAILED = "failed to connect to all addresses"  # gRPC's text; there is no status of its own for it
_READ_AHEAD = 64  # messages that wait for the reader; beyond that gRPC's flow control holds the server back


TakeMessage = Callable[[service_pb2.ModelStreamInferResponse], None]


class CallCancelled(Exception):
    """The call was cancelled, by us or by the server; the task that waited for it was not."""


class GrpcStream:
    """`connect_failed`: no connection was made, so nothing was sent. Belongs to the event loop that created it."""

    def __init__(self, call: grpc.aio.UnaryStreamCall) -> None:
        self.connect_failed = False
        self.call = call
        self._messages: deque[service_pb2.ModelStreamInferResponse] = deque()
        self._message_waiter: asyncio.Future[None] | None = None  # of the consumer
        self._room_waiter: asyncio.Future[None] | None = None  # of the reading task
        self._take: TakeMessage | None = None  # gets the messages that have no consumer any more
        self._over = False
        self._error: Exception | None = None
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._read())
        self._task.add_done_callback(self._on_read_done)

    async def next(self) -> service_pb2.ModelStreamInferResponse | None:
        """Return the next message; None after the last one. Raises CallCancelled and grpc.aio's errors."""
        while not self._messages:
            if self._over:
                if self._error is not None:
                    raise self._error
                return None
            self._message_waiter = self._loop.create_future()
            await self._message_waiter
        message = self._messages.popleft()
        _wake(self._room_waiter)
        return message

    @property
    def is_over(self) -> bool:
        """Whether the call has ended and everything was read."""
        return self._task.done()

    def discard(self, take: TakeMessage) -> None:
        """Give what is unread and what still comes to `take`; the consumer gets CallCancelled."""
        self._take = take
        while self._messages:
            take(self._messages.popleft())
        self._error, self._over = CallCancelled(), True
        _wake(self._message_waiter)
        _wake(self._room_waiter)

    def cancel(self) -> None:
        """Cancel the call unless it is over: the server stops its work, and what still comes in is discarded."""
        self._take = self._take or _drop
        self._messages.clear()
        self.call.cancel()
        _wake(self._room_waiter)

    async def ended(self) -> None:
        """Return when the call has ended, which is soon after `cancel`. May be cancelled itself."""
        await asyncio.wait([self._task])

    async def _read(self) -> None:
        try:
            while (message := await self.call.read()) is not grpc.aio.EOF:
                await self._deliver(message)
        except asyncio.CancelledError:
            self._error = CallCancelled()  # grpc.aio raises it although this task was not cancelled
        except Exception as error:  # any error belongs to the consumer, which may be gone
            self.connect_failed = isinstance(error, grpc.aio.AioRpcError) and _CONNECT_FAILED in (error.details() or "")
            self._error = error
        finally:
            self._over = True
            _wake(self._message_waiter)

    def _on_read_done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():  # Before its first step, so that `_read` could not record it.
            self._error = CallCancelled()
            self._over = True
            _wake(self._message_waiter)

    async def _deliver(self, message: service_pb2.ModelStreamInferResponse) -> None:
        if self._take is not None:
            self._take(message)
            return
        self._messages.append(message)
        _wake(self._message_waiter)
        while len(self._messages) >= _READ_AHEAD:
            self._room_waiter = self._loop.create_future()
            await self._room_waiter


def _drop(_message: service_pb2.ModelStreamInferResponse) -> None:
    """Nothing counts it."""


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
