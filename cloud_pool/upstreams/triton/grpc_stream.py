"""One gRPC call: the request is out, messages come in, in a task of its own that nobody cancels.

grpc.aio frees what a read has received only if the read is waited for to its end: the message of a cancelled one stays
for ever, and with it the 30 KB of receive buffer that it lies in (grpc issue 43360). So whoever leaves cancels the
call, not the read; the reads then end by themselves.
"""

from __future__ import annotations

import asyncio
from collections import deque

import grpc
from tritonclient.grpc import service_pb2

_REFUSED = "failed to connect to all addresses"  # gRPC's words, and all that it says
_AHEAD = 64  # messages read before anybody took them; then gRPC's flow control holds the server back


class CallCancelled(Exception):
    """The call was cancelled, by us or by the server's end of it; the task that waited for it was not."""


class GrpcStream:
    """`refused`: nobody took the connection, so that nothing was sent. Belongs to the loop that made it."""

    def __init__(self, call: grpc.aio.UnaryStreamCall) -> None:
        self.refused = False
        self.call = call
        self._messages: deque[service_pb2.ModelStreamInferResponse] = deque()
        self._news: asyncio.Future[None] | None = None  # somebody waits for a message
        self._room: asyncio.Future[None] | None = None  # the reader waits for room
        self._left = False
        self._over = False
        self._fault: Exception | None = None
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._run())
        self._task.add_done_callback(self._ended)

    async def next(self) -> service_pb2.ModelStreamInferResponse | None:
        """The next message; None after the last one. Raises CallCancelled and what grpc.aio raises."""
        while not self._messages:
            if self._over:
                if self._fault is not None:
                    raise self._fault
                return None
            self._news = self._loop.create_future()
            await self._news
        message = self._messages.popleft()
        _wake(self._room)
        return message

    @property
    def is_over(self) -> bool:
        """Nothing is left of the call."""
        return self._task.done()

    def drop(self) -> None:
        """What still comes in is dropped, up to the call's own end; whoever waits for it gets CallCancelled."""
        self._left = True
        self._messages.clear()
        self._fault, self._over = CallCancelled(), True
        _wake(self._news)
        _wake(self._room)

    def leave(self) -> None:
        """Cancels the call, unless it is over: the server stops its work, and what still comes in is dropped."""
        self._left = True
        self._messages.clear()
        self.call.cancel()
        _wake(self._room)

    async def ended(self) -> None:
        """Until nothing of the call is left. After `leave`, that is soon. May be cancelled."""
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        try:
            while (message := await self.call.read()) is not grpc.aio.EOF:
                await self._give(message)
        except asyncio.CancelledError:
            self._fault = CallCancelled()  # grpc.aio says so in a task that nobody cancelled
        except Exception as error:  # whatever it is belongs to the caller, who may be gone
            self.refused = isinstance(error, grpc.aio.AioRpcError) and _REFUSED in (error.details() or "")
            self._fault = error
        finally:
            self._over = True
            _wake(self._news)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():  # Before its first step: nothing in `_run` could say so.
            self._fault = CallCancelled()
            self._over = True
            _wake(self._news)

    async def _give(self, message: service_pb2.ModelStreamInferResponse) -> None:
        if self._left:
            return
        self._messages.append(message)
        _wake(self._news)
        while len(self._messages) >= _AHEAD:
            self._room = self._loop.create_future()
            await self._room


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
