"""The calls to one Triton in progress, and their cancellation without harm to other calls.

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
import msgspec
from anyio.abc import TaskGroup

from causeway_server.router.errors import CausewayError, CloudFailed, CloudRejected, DeadlineExceeded

from ..inference import CallMeter, Delta
from .connection import CallCancelled, CallFailed, GrpcStream, TritonConnection
from .errors import translate
from .protocol import INFER
from .tensors import DeltaReader, read_response, to_cancel_request

_UNSUPPORTED_S = 60.0  # how long a model that did not understand the request is not asked again; it may be replaced


class RunningCall(msgspec.Struct, eq=False):
    """A call in progress. `TritonClient.generate` owns it; others may only `fail` it."""

    model: str
    name: str
    stream: GrpcStream
    reader: DeltaReader
    meter: CallMeter | None = None  # counts its tokens
    has_responses: bool = False
    has_final: bool = False  # the last response has come
    ended_by: CausewayError | None = None

    def count(self, delta: Delta) -> None:
        """Count the tokens of a response."""
        self.has_final = self.has_final or delta.final
        if self.meter is not None:
            self.meter.output_tokens += delta.new_tokens
            self.meter.input_tokens = max(self.meter.input_tokens, delta.input_tokens)

    def end(self) -> None:
        """End the count of the call's tokens."""
        if self.meter is not None:
            self.meter.end()

    def fail(self, error: CausewayError) -> None:
        """Cancel the call with an error: no more messages are expected. The first error counts."""
        self.ended_by = self.ended_by or error
        self.stream.cancel()

    def expire(self) -> None:
        """End the call at its deadline."""
        self.ended_by = self.ended_by or DeadlineExceeded("The request's deadline has passed.")
        self.discard()

    def discard(self) -> None:
        """Only count the messages that still arrive."""
        self.stream.discard(self._count_message)

    def _count_message(self, data: bytes) -> None:
        self.has_responses = True
        with contextlib.suppress(CloudFailed):
            message = read_response(data)
            if message.error_message:
                self.has_final = True
                return
            self.count(self.reader.read(message.infer_response))


class Canceller(msgspec.Struct, frozen=True):
    """Ends calls whose client has left."""

    connection: TritonConnection  # to the Triton that runs the calls
    tasks: TaskGroup  # runs the requests to stop
    clock: Callable[[], float]  # monotonic, s
    stop_s: float  # how long a model may take to stop; 0: it cannot be asked
    unsupported_until: dict[str, float] = {}  # by model

    def release(self, call: RunningCall) -> None:
        """End a call that has no consumer any more. Returns at once."""
        call.discard()
        if call.has_final or call.stream.is_over:
            call.end()  # It ends by itself.
        elif not self.stop_s or not self._asks_model(call):
            call.stream.cancel()  # (1)
            call.end()
        else:
            try:
                self.tasks.start_soon(self._stop, call)  # (2)
            except RuntimeError:  # The gateway has ended.
                call.stream.cancel()
                call.end()

    def _asks_model(self, call: RunningCall) -> bool:
        if call.has_responses or isinstance(call.ended_by, DeadlineExceeded):
            return True
        is_known = self.clock() >= self.unsupported_until.get(call.model, -math.inf)
        return call.meter is not None and call.ended_by is None and is_known

    async def _stop(self, call: RunningCall) -> None:
        try:
            await (
                anyio.lowlevel.checkpoint()
            )  # Lets a cancellation at shutdown take effect before the connection closes.
            with anyio.move_on_after(self.stop_s):
                if await self._request_stop(call):
                    await call.stream.ended()
        finally:
            call.stream.cancel()  # (3)
            call.end()

    async def _request_stop(self, call: RunningCall) -> bool:
        """Return whether the model accepted the request."""
        if self.clock() < self.unsupported_until.get(call.model, -math.inf):
            return False
        request = to_cancel_request(call.model, call.name)
        stream = self.connection.call(INFER, request.SerializeToString(), timeout_s=self.stop_s)
        try:
            while (data := await stream.next()) is not None:
                message = read_response(data)
                error = translate("", message.error_message, "stream") if message.error_message else None
                if isinstance(error, CloudRejected) or message.infer_response.outputs:
                    self.unsupported_until[call.model] = self.clock() + _UNSUPPORTED_S
                if error is not None or message.infer_response.outputs:
                    return False
        except (CallFailed, CallCancelled, CloudFailed):
            return False
        finally:
            stream.cancel()
        return True
