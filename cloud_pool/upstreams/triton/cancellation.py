"""A running call, and how it is ended before its end without harm to anybody else's.

To cancel a call while its responses are on their way ends Triton 24.10 (signal 11, about once in a thousand times), and
with it every other answer that it makes. So:

1. nothing has come yet: the call is cancelled, which Triton stands
2. it has begun, or its time is over, at which moment the model says so too: the model is told to stop by a request of
   its own (`tensors.cancel_of`), and what still comes is dropped
3. a model that cannot be told (it is none of ours, or an old one), or that does not obey: the call is cancelled
"""

from __future__ import annotations

import math
from collections.abc import Callable

import anyio
import anyio.lowlevel
import grpc
from anyio.abc import TaskGroup

from router.errors import CausewayError, CloudRejected, DeadlineExceeded

from .connection import Connection
from .errors import translate
from .grpc_stream import CallCancelled, GrpcStream
from .tensors import to_cancel_request

STOP_S = 5.0
"""For a model that was told to stop."""
_DEAF_S = 60.0  # a model that could not be told is not told again; it may be another one by then


class RunningCall:
    """A running call. Its owner is `Triton.generate`; others may only `end` it."""

    def __init__(self, model: str, name: str, exchange: GrpcStream) -> None:
        self.model = model
        self.name = name  # of this call
        self.exchange = exchange
        self.begun = False  # something came
        self.final = False  # and the last of it too
        self.ended_by: CausewayError | None = None

    def end(self, why: CausewayError) -> None:
        """Nothing is to be expected from its model any more. Who ends it first says why."""
        self.ended_by = self.ended_by or why
        self.exchange.leave()

    def expire(self) -> None:
        """Its time is over."""
        self.ended_by = self.ended_by or DeadlineExceeded("the time for this request is over")
        self.exchange.drop()


class Canceller:
    """`tasks` is where models are told; `stop_s`: the time that one has to obey."""

    def __init__(
        self, connection: Connection, tasks: TaskGroup, clock: Callable[[], float], stop_s: float = STOP_S
    ) -> None:
        self._connection = connection
        self._tasks = tasks
        self._clock = clock
        self._stop_s = stop_s
        self._deaf: dict[str, float] = {}  # models that cannot be told: until when that is believed

    def release(self, stream: RunningCall) -> None:
        """Nobody wants more of it. Waits for nothing."""
        exchange = stream.exchange
        if exchange.is_over or not (stream.begun or isinstance(stream.ended_by, DeadlineExceeded)):
            exchange.leave()  # (1)
            return
        exchange.drop()
        if stream.final:
            return  # It ends by itself.
        try:
            self._tasks.start_soon(self._stop, stream)  # (2)
        except RuntimeError:  # The gateway has ended.
            exchange.leave()

    async def _stop(self, stream: RunningCall) -> None:
        try:
            await anyio.lowlevel.checkpoint()  # Not over a connection that is closed by now.
            with anyio.move_on_after(self._stop_s):
                if await self._tell(stream):
                    await stream.exchange.ended()
        finally:
            stream.exchange.leave()  # (3)

    async def _tell(self, stream: RunningCall) -> bool:
        """False: it could not be told."""
        if self._clock() < self._deaf.get(stream.model, -math.inf):
            return False
        request = to_cancel_request(stream.model, stream.name)
        exchange = GrpcStream(self._connection.stream_infer(request, metadata=(), timeout_s=self._stop_s))
        try:
            while (message := await exchange.next()) is not None:
                fault = translate("", message.error_message, "stream") if message.error_message else None
                if isinstance(fault, CloudRejected) or message.infer_response.outputs:
                    self._deaf[stream.model] = self._clock() + _DEAF_S
                if fault is not None or message.infer_response.outputs:
                    return False
        except (grpc.aio.AioRpcError, grpc.aio.InternalError, CallCancelled):
            return False
        finally:
            exchange.leave()
        return True
