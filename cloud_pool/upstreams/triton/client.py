"""One Triton server, over the gRPC stubs that tritonclient ships.

Not over its InferenceServerClient: that one drops the flag of the last response, which tells a whole answer from a
broken one, and takes a request through an iterator and numpy. One call a request, so that its end is the work's end
(`stopping`).

A Python model whose process (stub) died stays "ready", answers each new call with an error, and leaves running
calls hanging for ever. So the pool asks a model that is silent though it has work (`heard_at`, `probe`); at the
stub's error every stream of the model is ended and the model unloaded and loaded again, by one of the gateways: the
others see in the repository's index that somebody is at it, and wait. A Triton without explicit
model control cannot be repaired this way, nor one that its stub took along: a stub killed while it holds the shared
memory's lock aborts the server (boost lock_exception, about one time in ten), which the launcher starts again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import random
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Literal

import grpc
from anyio.abc import TaskGroup
from tritonclient.grpc import service_pb2

from router.errors import CausewayError, CloudUnreachable, DeadlineExceeded, EngineUnavailable, Phase, StreamBroken

from .cancellation import STOP_S, Canceller, RunningCall
from .connection import Connection
from .errors import RETRY_S, StubProcessDied, stub_process_died, translate
from .grpc_stream import CallCancelled, GrpcStream
from .sampling_parameters import SamplingParameters
from .tensors import Delta, InferenceRequest, read_delta, to_infer_request

PROBE_S = 3.0
LOAD_S = 300.0
PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # between attempts to load a model
SPREAD_S = 0.2  # over which several gateways begin a repair; no model is loaded in so little time
_LOOK_S = 0.2
_LOST_S = 5.0  # unloaded for so long, and not being loaded: whoever was at it is gone
_OVER = "Internal error from Core"
_IN_WORK = ("LOADING", "UNLOADING", "UNAVAILABLE")
_log = logging.getLogger("causeway.cloud.triton")


class TritonClient:
    """`tasks` runs repairs and probes; `repaired` is told each model that was loaded again."""

    def __init__(
        self,
        address: str,
        tasks: TaskGroup,
        *,
        clock: Callable[[], float] = time.monotonic,
        repaired: Callable[[str], None] = lambda model: None,
        pauses_s: Sequence[float] = PAUSES_S,
        chance: Callable[[], float] = random.random,
        stop_s: float = STOP_S,
    ) -> None:
        self.address = address
        self._tasks = tasks
        self._clock = clock
        self._repaired = repaired
        self._pauses_s = pauses_s
        self._chance = chance
        self._connection = Connection(address, tasks)
        self._stopping = Canceller(self._connection, tasks, clock, stop_s)
        self._streams: set[RunningCall] = set()
        self._in_repair: set[str] = set()
        self._heard: dict[str, float] = {}
        gateway = secrets.token_hex(8)
        self._names = (f"{gateway}-{number}" for number in itertools.count(1))  # of calls, no other one's
        self._closed = False

    async def generate(self, ask: InferenceRequest) -> AsyncGenerator[Delta, None]:
        """The answer, piece by piece. Raises CausewayError; closing the generator cancels the work in Triton."""
        if ask.model in self._in_repair:
            raise EngineUnavailable("the model is being loaded again", phase="connect", retry_after_s=RETRY_S)
        async with aclosing(self._generate(ask)) as deltas:
            try:
                async for delta in deltas:
                    yield delta
            except StubProcessDied:
                self._repair(ask.model)
                raise

    async def probe(self, model: str, timeout_s: float = PROBE_S) -> None:
        """A real, tiny inference: nothing less shows that the model answers. Raises CausewayError."""
        async with aclosing(self.generate(self._tiny(model, timeout_s))) as deltas:
            async for _ in deltas:
                pass

    def _tiny(self, model: str, timeout_s: float) -> InferenceRequest:
        parameters = SamplingParameters(max_tokens=1, temperature=0.0)
        deadline = self._clock() + timeout_s
        return InferenceRequest(model=model, prompt="a", parameters=parameters, deadline=deadline, request_id="probe")

    def last_received_at(self, model: str) -> float:
        """When anything last came from the model, on any stream; minus infinity before the first time."""
        return self._heard.get(model, -math.inf)

    def end(self, model: str, why: CausewayError, *, begun: bool = True) -> None:
        """Ends the model's running streams, each with this error; `begun` False: only those that brought nothing."""
        for stream in [one for one in self._streams if one.model == model and (begun or not one.begun)]:
            stream.end(why)

    async def close(self) -> None:
        self._closed = True
        await self._connection.close()

    def renew(self) -> None:
        """A new connection, for one that nothing comes through any more."""
        if not self._closed:
            self._connection.renew()

    async def _generate(self, ask: InferenceRequest) -> AsyncGenerator[Delta, None]:
        left_s = ask.deadline - self._clock()
        if left_s <= 0.0:
            raise DeadlineExceeded("the time for this request is over")
        metadata = [("traceparent", ask.traceparent)] if ask.traceparent else []
        name = next(self._names)
        request = to_infer_request(ask, left_s, name)
        # The time is kept here: gRPC's own deadline would cancel the call.
        exchange = GrpcStream(
            self._connection.stream_infer(request, metadata=metadata, timeout_s=left_s + 2.0 * STOP_S)
        )
        stream = RunningCall(ask.model, name, exchange)
        self._streams.add(stream)
        timer = asyncio.get_running_loop().call_later(left_s, stream.expire)
        phase: Phase = "connect"
        try:
            while (message := await exchange.next()) is not None:
                self._heard[ask.model] = self._clock()
                stream.begun = True
                if message.error_message:
                    stream.final = True
                    _log.debug("%s: %s", ask.request_id, message.error_message)
                    raise translate("", message.error_message, _reached(phase, exchange))
                delta = read_delta(message.infer_response, ask.parameters.logprobs or 0)
                stream.final = stream.final or delta.final
                phase = "stream"
                yield delta
            if not stream.final:
                raise _broken(await exchange.call.code(), await exchange.call.details(), _reached(phase, exchange))
        except grpc.aio.AioRpcError as error:
            # Only here in full: a model's exception may quote what it was asked.
            _log.debug("%s: %s: %s", ask.request_id, error.code(), error.details())
            code = grpc.StatusCode.UNAVAILABLE if error.details() == _OVER else error.code()
            raise _broken(code, error.details(), _reached(phase, exchange)) from None
        except (CallCancelled, grpc.aio.InternalError):
            # gRPC found the call over, and does not say why.
            gone = _broken(grpc.StatusCode.UNAVAILABLE, "", _reached(phase, exchange))
            raise stream.ended_by or gone from None
        finally:
            timer.cancel()
            self._streams.discard(stream)
            self._stopping.release(stream)

    def _repair(self, model: str) -> None:
        """Decide, then act: from here on the model is in repair, and nothing waits for its dead process."""
        if self._closed or model in self._in_repair:
            return
        self._in_repair.add(model)
        # What brought nothing yet can be made again elsewhere; what has begun is broken.
        self.end(model, stub_process_died("first_token"), begun=False)
        self.end(
            model, StreamBroken("the model's process died during the answer", phase="stream", retry_after_s=RETRY_S)
        )
        self._tasks.start_soon(self._load_again, model)

    async def _load_again(self, model: str) -> None:
        try:
            await asyncio.sleep(SPREAD_S * self._chance())
            if self._closed or await self._by_others(model):
                return
            _log.warning("%s: the process of %s died, loading the model again", self.address, model)
            unload = service_pb2.RepositoryModelUnloadRequest(model_name=model)
            await self._connection.stub.RepositoryModelUnload(unload, timeout=LOAD_S)
            await self._load(model)
            self._repaired(model)
            _log.warning("%s: %s is loaded again", self.address, model)
        except grpc.aio.AioRpcError as error:
            _log.error("%s: %s could not be loaded again: %s", self.address, model, error.details())
        finally:
            # The next request finds out: it works, or it begins another repair.
            self._in_repair.discard(model)

    async def _by_others(self, model: str) -> bool:
        """Whether somebody else loads it again, or has: then this returns when that is done. A model that the index
        calls ready may be the dead one, and the death that was heard of one that is mended long since: it is asked."""
        work = await self._work_of_others(model)
        if work == "none":
            if await self._answers(model):
                return True
            work = await self._work_of_others(model)  # Others asked it at the same time, and one was first.
        return work == "done"

    async def _work_of_others(self, model: str) -> Literal["none", "done", "left"]:
        """Until there is none; `left`: unloaded, and nobody goes on."""
        lost_at: float | None = None
        seen = first = await self._state_of(model)
        while seen in _IN_WORK:
            lost_at = None if seen != "UNAVAILABLE" else lost_at or self._clock() + _LOST_S
            if lost_at is not None and self._clock() >= lost_at:
                return "left"
            await asyncio.sleep(_LOOK_S)
            seen = await self._state_of(model)
        return "done" if first in _IN_WORK else "none"

    async def _answers(self, model: str) -> bool:
        try:
            async with aclosing(self._generate(self._tiny(model, PROBE_S))) as deltas:
                async for _ in deltas:
                    pass
        except CausewayError:
            return False
        return True

    async def _state_of(self, model: str) -> str:
        """In the repository's index; "" where Triton does not say. Raises AioRpcError when it is gone."""
        try:
            index = await self._connection.stub.RepositoryIndex(service_pb2.RepositoryIndexRequest(), timeout=PROBE_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return ""
            raise
        return next((one.state for one in index.models if one.name == model), "")

    async def _load(self, model: str) -> None:
        """Until it is loaded: unloaded as it is, nobody else would do it. Raises AioRpcError when Triton is gone, which
        loads its models when it is back."""
        load = service_pb2.RepositoryModelLoadRequest(model_name=model)
        for pause_s in (*self._pauses_s, None):
            try:
                await self._connection.stub.RepositoryModelLoad(load, timeout=LOAD_S)
                return
            except grpc.aio.AioRpcError as error:
                if pause_s is None or error.code() is grpc.StatusCode.UNAVAILABLE:
                    raise
                _log.warning("%s: %s is not loaded yet: %s", self.address, model, error.details())
            await asyncio.sleep(pause_s)


def _reached(phase: Phase, exchange: GrpcStream) -> Phase:
    """`phase`, or how far a call came that brought nothing yet."""
    return phase if phase == "stream" or exchange.refused else "first_token"


def _broken(code: grpc.StatusCode, details: str | None, phase: Phase) -> CausewayError:
    found = translate(code.name, details or "", phase)
    if phase == "stream" and (code is grpc.StatusCode.OK or isinstance(found, CloudUnreachable)):
        return StreamBroken("Triton ended the answer before its end", phase="stream", retry_after_s=RETRY_S)
    return found
