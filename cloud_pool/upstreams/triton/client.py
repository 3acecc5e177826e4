"""A Triton server. Each request is one gRPC call, so that the call's end is the end of the work (`calls`).

A Python model whose process (stub) died stays "ready", answers each new call with an error, and leaves calls in
progress hanging for ever. So the pool probes a model that is silent although it has work (`last_received_at`, `probe`).
At the stub's error every call of the model is failed, and one of the gateways unloads and loads the model; the others
see in the repository's index that a repair is in progress, and wait. This cannot repair a Triton without explicit model
control or with another key, nor one that died with its stub: a stub killed while it holds the lock of the shared memory
aborts the server (boost lock_exception, about one time in ten), which the launcher then restarts.
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
from pathlib import Path
from typing import Literal

import anyio
import msgspec
from anyio.abc import TaskGroup

from causeway_server.router.errors import (
    CausewayError,
    CloudUnreachable,
    ConfigError,
    DeadlineExceeded,
    EngineUnavailable,
    Phase,
    StreamBroken,
)
from causeway_server.router.serving.tls.contexts import TlsContext

from ..inference import PROBE_S, Delta, InferenceRequest
from .calls import Canceller, RunningCall
from .connection import CallCancelled, CallFailed, ConnectFailed, GrpcStream, TritonConnection
from .errors import RETRY_S, StubProcessDied, stub_process_died, translate
from .messages import SamplingParameters
from .model_control import HEADER, is_refusal, read_key
from .protocol import (
    INFER,
    MODEL_LOAD,
    MODEL_UNLOAD,
    REPOSITORY_INDEX,
    RepositoryIndexResponse,
    RepositoryModelLoadRequest,
    RepositoryModelUnloadRequest,
)
from .tensors import STOP_S, TensorFormat, VllmTensors, read_response

LOAD_S = 300.0
PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # between attempts to load a model
SPREAD_S = 0.2  # over which several gateways begin a repair; no model loads in so little time
_POLL_S = 0.2
_ABANDONED_S = 5.0  # a model that is unloaded and not loading for this long: the gateway that repaired it is gone
_CONNECT_PAUSE_S = 1.0
_IN_REPAIR = ("LOADING", "UNLOADING", "UNAVAILABLE")
log = logging.getLogger(__name__)
VLLM = VllmTensors()


class TritonAccess(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of connections to Triton servers.

    `key_file` has the key of their model control; `server_name`: in their certificates; "": the host of each address.
    """

    key_file: Path | None = None
    tls: TlsContext | None = None
    server_name: str = ""


PLAIN = TritonAccess()


class TritonClient:
    """A client of one server.

    Args:
        address: Address of its gRPC port, as host:port.
        tasks: Parent of repairs and requests to stop.
        reloaded: Callback for the name of each model that this gateway loaded again.
        pauses_s: Pauses between attempts to load a model.
        rng: Random number in [0, 1), to spread repairs by several gateways.
        tensors: Tensors of the models that it is called for.
    """

    def __init__(
        self,
        address: str,
        tasks: TaskGroup,
        *,
        clock: Callable[[], float] = time.monotonic,
        reloaded: Callable[[str], None] = lambda model: None,
        pauses_s: Sequence[float] = PAUSES_S,
        rng: Callable[[], float] = random.random,
        tensors: TensorFormat = VLLM,
        access: TritonAccess = PLAIN,
    ) -> None:
        self.address = address
        self._format = tensors
        self._tasks = tasks
        self._clock = clock
        self._reloaded = reloaded
        self._pauses_s = pauses_s
        self._key_file = access.key_file
        self._rng = rng
        self._connection = TritonConnection(address, tasks, access.tls, access.server_name)
        self._canceller = Canceller(self._connection, tasks, clock, tensors.stop_s)
        self._calls: set[RunningCall] = set()
        self._in_repair: set[str] = set()
        self._received_at: dict[str, float] = {}
        gateway = secrets.token_hex(8)
        self._call_names = (f"{gateway}-{number}" for number in itertools.count(1))  # unique among all gateways
        self._closed = False

    async def generate(self, request: InferenceRequest, *, repairs: bool = True) -> AsyncGenerator[Delta, None]:
        """Yield the deltas of one request; closing the generator stops the work in Triton. Raises CausewayError.

        `repairs` False: call a model even while it is being loaded, and do not repair it if it is dead.
        """
        if repairs and request.model in self._in_repair:
            raise EngineUnavailable("The model is being loaded again.", phase="connect", retry_after_s=RETRY_S)
        left_s = request.deadline - self._clock()
        if left_s <= 0.0:
            raise DeadlineExceeded("The request's deadline has passed.")
        metadata = [("traceparent", request.traceparent)] if request.traceparent else []
        name = next(self._call_names)
        message = self._format.encode(request, left_s, name)
        # The deadline is kept here, because gRPC's own would cancel the call.
        timeout_s = left_s + 2.0 * STOP_S
        stream = self._connection.call(INFER, message.SerializeToString(), timeout_s=timeout_s, metadata=metadata)
        meter = None if request.meter is None else request.meter.begin(request.estimated_tokens)
        call = RunningCall(request.model, name, stream, self._format.reader(request), meter)
        self._calls.add(call)
        timer = asyncio.get_running_loop().call_later(left_s, call.expire)
        phase: Phase = "connect"
        try:
            try:
                while (data := await stream.next()) is not None:
                    self._received_at[request.model] = self._clock()
                    call.has_responses = True
                    response = read_response(data)
                    if response.error_message:
                        call.has_final = True
                        raise _logged(request, translate("", response.error_message, _reached(phase, stream)))
                    delta = call.reader.read(response.infer_response)
                    call.count(delta)
                    phase = "stream"
                    yield delta
                    if call.has_final:
                        return  # The call ends by itself; waiting for that could only fail an answer that is whole.
                raise _broken("OK", "", _reached(phase, stream))
            except CallFailed as error:
                raise _logged(request, _broken(error.code, error.details, _reached(phase, stream))) from None
            except CallCancelled:
                raise call.ended_by or _broken("UNAVAILABLE", "", _reached(phase, stream)) from None
            finally:
                timer.cancel()
                self._calls.discard(call)
                self._canceller.release(call)
        except StubProcessDied:
            if repairs:
                self.repair(request.model, embed=request.embed)
            raise

    async def probe(self, model: str, timeout_s: float = PROBE_S, *, embed: bool = False, repairs: bool = True) -> None:
        """Run a tiny inference, the only proof that a model works; `repairs`: as `generate`. Raises CausewayError."""
        request = InferenceRequest(
            model=model,
            prompt="a",
            parameters=SamplingParameters(max_tokens=1, temperature=0.0),
            embed=embed,
            deadline=self._clock() + timeout_s,
            request_id="probe",
        )
        async with aclosing(self.generate(request, repairs=repairs)) as deltas:
            async for _ in deltas:
                pass

    def last_received_at(self, model: str) -> float:
        """Return when the last response came from the model, on any call; minus infinity before the first one."""
        return self._received_at.get(model, -math.inf)

    def fail_calls(self, model: str, error: CausewayError, *, begun: bool = True) -> None:
        """Fail the model's calls in progress with `error`; `begun` False: only those without a response yet."""
        for call in [
            running for running in self._calls if running.model == model and (begun or not running.has_responses)
        ]:
            call.fail(error)

    async def close(self) -> None:
        self._closed = True
        self._connection.close()

    def renew(self) -> None:
        """Replace a connection through which nothing arrives any more."""
        if not self._closed:
            self._connection.renew()

    @property
    def models_in_repair(self) -> frozenset[str]:
        return frozenset(self._in_repair)

    def repair(self, model: str, *, embed: bool = False) -> None:
        """Mark the model as being repaired and fail its calls, so that none waits for the dead process.

        `embed`: the failed call was for a vector, and so is the probe that checks for another gateway's repair.
        """
        if self._closed or model in self._in_repair:
            return
        self._in_repair.add(model)
        # A call without a response can be retried elsewhere; one that has begun is broken.
        self.fail_calls(model, stub_process_died("first_token"), begun=False)
        self.fail_calls(
            model, StreamBroken("The model's process died during the answer.", phase="stream", retry_after_s=RETRY_S)
        )
        self._tasks.start_soon(self._reload, model, embed)

    async def check_model_control(self) -> None:
        """Wait until the server answers, and warn if its model control is open to everybody, or closed to us."""
        try:
            with anyio.fail_after(LOAD_S):
                await self._control(REPOSITORY_INDEX, waits=True)
            log.warning(
                "Triton at %s: its model control is open to every program that reaches its port, and such a program "
                "can run code by loading a model. Start Triton with `causeway-cloud triton`, or with the option "
                "--grpc-restricted-protocol.",
                self.address,
            )
        except CallFailed as error:
            if is_refusal(error.details):
                await self._check_key()
        except (CallCancelled, TimeoutError):
            pass  # The client was closed before the server answered.

    async def _check_key(self) -> None:
        try:
            await self._control(REPOSITORY_INDEX, key=True)
        except CallCancelled:
            pass  # The client was closed meanwhile.
        except CallFailed as error:
            if is_refusal(error.details):
                log.warning(
                    "Triton at %s refuses the key of its model control, so a model whose process dies is not loaded "
                    "again. Set triton_key_file to the file that was given to Triton's launcher as --key-file.",
                    self.address,
                )

    async def _control(
        self, path: str, request: bytes = b"", *, key: bool = False, timeout_s: float = LOAD_S, waits: bool = False
    ) -> bytes:
        """Return the response of model control, with the `key` if needed. Raises CallFailed or CallCancelled.

        `waits`: whether to wait for a server that cannot be reached yet.
        """
        metadata = self._key_metadata() if key else ()
        while True:
            try:
                return await self._connection.unary(path, request, timeout_s=timeout_s, metadata=metadata)
            except ConnectFailed:
                if not waits:
                    raise
            await asyncio.sleep(_CONNECT_PAUSE_S)

    def _key_metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata of a call that needs the key, read each time: the launcher may start after us."""
        if self._key_file is None or not self._key_file.exists():
            return ()
        try:
            return ((HEADER, read_key(self._key_file)),)
        except ConfigError as error:
            log.error("%s", error.message)
            return ()

    async def _reload(self, model: str, embed: bool) -> None:
        try:
            await asyncio.sleep(SPREAD_S * self._rng())
            if self._closed or await self._repaired_by_peer(model, embed):
                return
            log.warning(
                "Triton at %s: the process of model %s died, so the model is loaded again.", self.address, model
            )
            unload = RepositoryModelUnloadRequest(model_name=model)
            await self._control(MODEL_UNLOAD, unload.SerializeToString(), key=True)
            await self._load(model)
            self._reloaded(model)
            log.warning("Triton at %s: model %s has been loaded again.", self.address, model)
        except (CallFailed, CallCancelled) as error:
            why = error.details if isinstance(error, CallFailed) else "Triton cancelled the call."
            log.error("Triton at %s: model %s could not be loaded again: %s", self.address, model, why)
        finally:
            # The next request shows whether it works, or begins another repair.
            self._in_repair.discard(model)

    async def _repaired_by_peer(self, model: str, embed: bool) -> bool:
        """Return whether another gateway reloads the model or has; a probe tells, as the index does not."""
        repair = await self._await_peer_repair(model)
        if repair == "none":
            if await self._works(model, embed):
                return True
            repair = await self._await_peer_repair(model)  # Several gateways probed at once, and one was first.
        return repair == "done"

    async def _await_peer_repair(self, model: str) -> Literal["none", "done", "abandoned"]:
        """Wait while another gateway repairs the model. `abandoned`: the model stays unloaded."""
        give_up_at: float | None = None
        state = first = await self._state_of(model)
        while state in _IN_REPAIR:
            give_up_at = None if state != "UNAVAILABLE" else give_up_at or self._clock() + _ABANDONED_S
            if give_up_at is not None and self._clock() >= give_up_at:
                return "abandoned"
            await asyncio.sleep(_POLL_S)
            state = await self._state_of(model)
        return "done" if first in _IN_REPAIR else "none"

    async def _works(self, model: str, embed: bool) -> bool:
        try:
            await self.probe(model, embed=embed, repairs=False)
        except CausewayError:
            return False
        return True

    async def _state_of(self, model: str) -> str:
        """Return the model's state in the repository's index; "" if Triton has none. Raises CallFailed."""
        try:
            response = await self._control(REPOSITORY_INDEX, key=True, timeout_s=PROBE_S)
        except CallFailed as error:
            if error.code == "UNIMPLEMENTED":
                return ""
            raise
        index = RepositoryIndexResponse.FromString(response)
        return next((entry.state for entry in index.models if entry.name == model), "")

    async def _load(self, model: str) -> None:
        """Load the model, with retries, as no other process does. Raises CallFailed if Triton is gone."""
        load = RepositoryModelLoadRequest(model_name=model).SerializeToString()
        for pause_s in (*self._pauses_s, None):
            try:
                await self._control(MODEL_LOAD, load, key=True)
                return
            except CallFailed as error:
                if pause_s is None or error.code == "UNAVAILABLE":
                    raise
                log.warning("Triton at %s: model %s is not loaded yet: %s", self.address, model, error.details)
            await asyncio.sleep(pause_s)


def _reached(phase: Phase, stream: GrpcStream) -> Phase:
    """Return `phase`, corrected for a call without a response: if it was sent, it waited for its first token."""
    return phase if phase == "stream" or stream.connect_failed else "first_token"


def _logged(request: InferenceRequest, error: CausewayError) -> CausewayError:
    """Log only the error's code, because Triton's text may quote the request."""
    log.debug("%s: %s", request.request_id, error.code)
    return error


def _broken(code: str, details: str, phase: Phase) -> CausewayError:
    error = translate(code, details, phase)
    if phase == "stream" and (code == "OK" or isinstance(error, CloudUnreachable)):
        return StreamBroken("Triton ended the stream before the answer's end.", phase="stream", retry_after_s=RETRY_S)
    return error
