"""Connection to one Triton over gRPC, its calls, and their cancellation without harm to other calls.

Cancelling a call while its responses are on their way crashes Triton 24.10 (signal 11, about once in a thousand times),
and with it every other call in progress. So:

1. No response has come yet, and nothing is billed: cancel the call, which Triton survives.
2. Responses have come, the deadline has passed (at which the model itself sends an error), or the call is billed: ask
   the model to stop, by a request of its own (`tensors.to_cancel_request`), and only count the tokens of what still
   comes. The last response of our own model tells what was generated until it stopped.
3. The model does not understand the request (a stock backend, or an old version of ours) or does not obey: cancel.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Callable, Sequence

import anyio
import anyio.lowlevel
import grpc
import msgspec
from anyio.abc import TaskGroup
from tritonclient.grpc import service_pb2, service_pb2_grpc

from causeway_server.router.errors import CausewayError, CloudFailed, CloudRejected, DeadlineExceeded

from ..inference import Delta
from ..token_meter import CallMeter
from .errors import translate
from .tensors import DeltaReader, to_cancel_request

_STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"
_GRACE_S = 3600.0  # calls on the old channel may still end, if it was the server that was silent; they have deadlines
_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # A restarted Triton is back in seconds; gRPC would wait up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Limit of one connection attempt. Distant and busy servers need some tenths of a second.
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_http_proxy", 0),
    # Without it a new channel to the same address would reuse the old connection.
    ("grpc.use_local_subchannel_pool", 1),
)
_CONNECT_FAILED = "failed to connect to all addresses"  # gRPC's text, as it has no separate status for this
_READ_AHEAD = 64  # messages that wait for the reader; beyond that gRPC's flow control holds the server back
TakeMessage = Callable[[service_pb2.ModelStreamInferResponse], None]
_UNSUPPORTED_S = 60.0  # how long a model that did not understand the request is not asked again; it may be replaced


class TritonConnection:
    """A gRPC channel, replaced when nothing comes through it any more. `tasks` closes the channels that were replaced.

    A firewall or NAT that forgets a connection, or a host that vanishes, leaves it open at our end. TCP notices after
    minutes; pings would notice sooner, but Triton treats frequent ones as an attack (GOAWAY, too_many_pings). So the
    pool, which knows when an endpoint is silent, has the connection renewed.
    """

    def __init__(self, address: str, tasks: TaskGroup) -> None:
        self._address = address
        self._tasks = tasks
        self._replaced: set[grpc.aio.Channel] = set()
        self._open()

    def renew(self) -> None:
        """Use a new connection for new calls; calls in progress stay on theirs."""
        replaced = self._channel
        self._open()
        self._replaced.add(replaced)
        self._tasks.start_soon(self._close_replaced, replaced)

    def stream_infer(
        self, request: service_pb2.ModelInferRequest, *, metadata: Sequence[tuple[str, str]], timeout_s: float
    ) -> grpc.aio.UnaryStreamCall:
        """Start ModelStreamInfer for one request.

        The request and the half-close are sent together. With the generated stub they are separate operations, each of
        which costs a round through gRPC: 0.1 to 0.2 ms to the first token.
        """
        return self._stream_infer(request, metadata=metadata, timeout=timeout_s)

    async def close(self) -> None:
        for channel in (self._channel, *self._replaced):
            await channel.close()

    def _open(self) -> None:
        self._channel = grpc.aio.insecure_channel(self._address, options=_OPTIONS)
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._stream_infer = self._channel.unary_stream(
            _STREAM_INFER,
            request_serializer=service_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
        )

    async def _close_replaced(self, channel: grpc.aio.Channel) -> None:
        await channel.close(_GRACE_S)
        self._replaced.discard(channel)


class CallCancelled(Exception):
    """The call was cancelled, by us or by the server; the waiting task was not."""


class GrpcStream:
    """A call: the request is sent, and a task that is never cancelled reads the messages.

    grpc.aio frees received data only if the read is awaited to its end: the message of a cancelled read stays in memory
    for ever, with the 30 KB of receive buffer that it lies in (grpc issue 43360). So a reader that leaves cancels the
    call and not the read; the reads then end by themselves.

    `connect_failed`: no connection was made, so nothing was sent. Belongs to the event loop that created it.
    """

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
        """Whether the call has ended and all messages were read."""
        return self._task.done()

    def discard(self, take: TakeMessage) -> None:
        """Pass all unread and future messages to `take`; the consumer gets CallCancelled."""
        self._take = take
        while self._messages:
            take(self._messages.popleft())
        self._error, self._over = CallCancelled(), True
        _wake(self._message_waiter)
        _wake(self._room_waiter)

    def cancel(self) -> None:
        """Cancel the call unless it is over: the server stops its work, and messages still arriving are discarded."""
        self._take = self._take or _drop
        self._messages.clear()
        self.call.cancel()
        _wake(self._room_waiter)

    async def ended(self) -> None:
        """Wait until the call has ended, which is soon after `cancel`. May be cancelled itself."""
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
    """Ignore the message: it is not counted."""


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


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
        self.ended_by = self.ended_by or DeadlineExceeded("The time for this request is over.")
        self.discard()

    def discard(self) -> None:
        """Only count the messages that still arrive."""
        self.stream.discard(self._count_message)

    def _count_message(self, message: service_pb2.ModelStreamInferResponse) -> None:
        self.has_responses = True
        if message.error_message:
            self.has_final = True
            return
        with contextlib.suppress(CloudFailed):
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
        stream = GrpcStream(self.connection.stream_infer(request, metadata=(), timeout_s=self.stop_s))
        try:
            while (message := await stream.next()) is not None:
                error = translate("", message.error_message, "stream") if message.error_message else None
                if isinstance(error, CloudRejected) or message.infer_response.outputs:
                    self.unsupported_until[call.model] = self.clock() + _UNSUPPORTED_S
                if error is not None or message.infer_response.outputs:
                    return False
        except (grpc.aio.AioRpcError, grpc.aio.InternalError, CallCancelled):
            return False
        finally:
            stream.cancel()
        return True
