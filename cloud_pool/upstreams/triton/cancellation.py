"""A call in progress, and how it is ended without harm to other calls.

Cancelling a call while its responses are on their way crashes Triton 24.10 (signal 11, about once in a thousand times),
and with it every other call in progress. So:

1. No response has come yet: cancel the call, which Triton survives.
2. Responses have come, or the deadline has passed (at which the model itself sends an error): ask the model to stop, by
   a request of its own (`tensors.to_cancel_request`), and discard what still comes.
3. The model does not understand the request (a stock backend, or an old version of ours) or does not obey: cancel.
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
"""How long a model may take to stop."""
_UNSUPPORTED_S = 60.0  # how long a model that did not understand the request is not asked again; it may be replaced


class RunningCall:
    """A call in progress. `TritonClient.generate` owns it; others may only `fail` it."""

    def __init__(self, model: str, name: str, stream: GrpcStream) -> None:
        self.model = model
        self.name = name
        self.stream = stream
        self.has_responses = False
        self.has_final = False  # the last response has come
        self.ended_by: CausewayError | None = None

    def fail(self, error: CausewayError) -> None:
        """Cancel the call: nothing more is expected from its model. The first error counts."""
        self.ended_by = self.ended_by or error
        self.stream.cancel()

    def expire(self) -> None:
        """End the call at its deadline."""
        self.ended_by = self.ended_by or DeadlineExceeded("the time for this request is over")
        self.stream.discard()


class Canceller:
    """Ends calls whose client has left.

    Args:
        connection: to the Triton that runs the calls.
        tasks: runs the requests to stop.
        clock: monotonic time in seconds.
        stop_s: how long a model may take to stop.
    """

    def __init__(
        self, connection: Connection, tasks: TaskGroup, clock: Callable[[], float], stop_s: float = STOP_S
    ) -> None:
        self._connection = connection
        self._tasks = tasks
        self._clock = clock
        self._stop_s = stop_s
        self._unsupported_until: dict[str, float] = {}  # by model

    def release(self, call: RunningCall) -> None:
        """End a call that has no consumer any more. Returns at once."""
        stream = call.stream
        if stream.is_over or not (call.has_responses or isinstance(call.ended_by, DeadlineExceeded)):
            stream.cancel()  # (1)
            return
        stream.discard()
        if call.has_final:
            return  # It ends by itself.
        try:
            self._tasks.start_soon(self._stop, call)  # (2)
        except RuntimeError:  # The gateway has ended.
            stream.cancel()

    async def _stop(self, call: RunningCall) -> None:
        try:
            await (
                anyio.lowlevel.checkpoint()
            )  # Lets a cancellation at shutdown take effect before the connection closes.
            with anyio.move_on_after(self._stop_s):
                if await self._request_stop(call):
                    await call.stream.ended()
        finally:
            call.stream.cancel()  # (3)

    async def _request_stop(self, call: RunningCall) -> bool:
        """Return whether the model accepted the request."""
        if self._clock() < self._unsupported_until.get(call.model, -math.inf):
            return False
        request = to_cancel_request(call.model, call.name)
        stream = GrpcStream(self._connection.stream_infer(request, metadata=(), timeout_s=self._stop_s))
        try:
            while (message := await stream.next()) is not None:
                error = translate("", message.error_message, "stream") if message.error_message else None
                if isinstance(error, CloudRejected) or message.infer_response.outputs:
                    self._unsupported_until[call.model] = self._clock() + _UNSUPPORTED_S
                if error is not None or message.infer_response.outputs:
                    return False
        except (grpc.aio.AioRpcError, grpc.aio.InternalError, CallCancelled):
            return False
        finally:
            stream.cancel()
        return True
