"""A call in progress, and how it is ended without harm to other calls.

Cancelling a call while its responses are on their way crashes Triton 24.10 (signal 11, about once in a thousand times),
and with it every other call in progress. So:

1. No response has come yet, and nothing is billed: cancel the call, which Triton survives.
2. Responses have come, the deadline has passed (at which the model itself sends an error), or the call is billed: ask
   the model to stop, by a request of its own (`tensors.to_cancel_request`), and only count the tokens of what still
   comes. The last response of our own model tells what was generated until it stopped.
3. The model does not understand the request (a stock backend, or an old version of ours) or does not obey: cancel.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import anyio
import anyio.lowlevel
import grpc
from anyio.abc import TaskGroup
from tritonclient.grpc import service_pb2

from router.errors import CausewayError, CloudFailed, CloudRejected, DeadlineExceeded

from ..token_meter import CallMeter
from .connection import TritonConnection
from .errors import translate
from .grpc_stream import CallCancelled, GrpcStream
from .tensors import Delta, read_delta, to_cancel_request

STOP_S = 5.0
"""How long a model may take to stop."""
_UNSUPPORTED_S = 60.0  # how long a model that did not understand the request is not asked again; it may be replaced


class RunningCall:
    """A call in progress. `TritonClient.generate` owns it; others may only `fail` it. `meter` counts its tokens."""

    def __init__(self, model: str, name: str, stream: GrpcStream, meter: CallMeter | None = None) -> None:
        self.model = model
        self.name = name
        self.stream = stream
        self.meter = meter
        self.has_responses = False
        self.has_final = False  # the last response has come
        self.ended_by: CausewayError | None = None

    def count(self, delta: Delta) -> None:
        """Count the tokens of a response."""
        self.has_final = self.has_final or delta.final
        if self.meter is not None and delta.new_tokens:
            self.meter.output_tokens += sum(delta.new_tokens)
            self.meter.input_tokens = max(self.meter.input_tokens, delta.input_tokens)

    def end(self) -> None:
        """End the count: nothing more comes."""
        if self.meter is not None:
            self.meter.end()

    def fail(self, error: CausewayError) -> None:
        """Cancel the call: nothing more is expected from its model. The first error counts."""
        self.ended_by = self.ended_by or error
        self.stream.cancel()

    def expire(self) -> None:
        """End the call at its deadline."""
        self.ended_by = self.ended_by or DeadlineExceeded("the time for this request is over")
        self.discard()

    def discard(self) -> None:
        """Only count what still comes."""
        self.stream.discard(self._count_message)

    def _count_message(self, message: service_pb2.ModelStreamInferResponse) -> None:
        self.has_responses = True
        if message.error_message:
            self.has_final = True
            return
        with contextlib.suppress(CloudFailed):
            self.count(read_delta(message.infer_response, 0))


class Canceller:
    """Ends calls whose client has left.

    Args:
        connection: to the Triton that runs the calls.
        tasks: runs the requests to stop.
        clock: monotonic time in seconds.
        stop_s: how long a model may take to stop.
    """

    def __init__(
        self, connection: TritonConnection, tasks: TaskGroup, clock: Callable[[], float], stop_s: float = STOP_S
    ) -> None:
        self._connection = connection
        self._tasks = tasks
        self._clock = clock
        self._stop_s = stop_s
        self._unsupported_until: dict[str, float] = {}  # by model

    def release(self, call: RunningCall) -> None:
        """End a call that has no consumer any more. Returns at once."""
        call.discard()
        if call.has_final or call.stream.is_over:
            call.end()  # It ends by itself.
        elif not self._asks_model(call):
            call.stream.cancel()  # (1)
            call.end()
        else:
            try:
                self._tasks.start_soon(self._stop, call)  # (2)
            except RuntimeError:  # The gateway has ended.
                call.stream.cancel()
                call.end()

    def _asks_model(self, call: RunningCall) -> bool:
        if call.has_responses or isinstance(call.ended_by, DeadlineExceeded):
            return True
        is_known = self._clock() >= self._unsupported_until.get(call.model, -math.inf)
        return call.meter is not None and call.ended_by is None and is_known

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
            call.end()

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
