"""A tier in virtual time, which jumps from event to event: the gateways' own pools, admission and dispatchers, before
servers that are timers. Minutes of load take seconds, and chance comes from a seed."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import cast

import anyio
import msgspec

from causeway_server.cloud_pool.admission import AdmissionController
from causeway_server.cloud_pool.admission.permits import AdmissionSettings as AdmissionSettings
from causeway_server.cloud_pool.core.request_context import RequestContext
from causeway_server.cloud_pool.degradation.config import DegradationConfig
from causeway_server.cloud_pool.degradation.fallback import FallbackRequest, TierFallback, TierSignals
from causeway_server.cloud_pool.degradation.tier_attempt import TierAttempt, TierFailed, TierRuntime
from causeway_server.cloud_pool.dispatch.discovery import TierEndpoints, parse_endpoint_address
from causeway_server.cloud_pool.dispatch.dispatcher import Dispatcher
from causeway_server.cloud_pool.dispatch.pool import Pool
from causeway_server.cloud_pool.tiers.tier import Tier
from causeway_server.cloud_pool.upstreams.inference import Delta, InferenceRequest
from causeway_server.cloud_pool.upstreams.triton.client import TritonClient
from causeway_server.cloud_pool.upstreams.triton.messages import SamplingParameters
from causeway_server.router.errors import CausewayError, DeadlineExceeded
from causeway_server.router.types import Request

TIER = "large"
SLOTS, PREFILL_S, STEP_S, TOKENS = 8, 0.2, 0.1, 4
PROBE = "probe"


class Server:
    """One replica: SLOTS answers at once, others wait; a first token after PREFILL_S, then one each STEP_S."""

    def __init__(self) -> None:
        self.factor = 1.0  # how much slower it is
        self.probe_factor = 1.0  # the same for the pool's probes
        self.calls = 0  # without probes
        self._waiting: list[asyncio.Event] = []
        self._running = 0
        self._goes_on = asyncio.Event()
        self._goes_on.set()

    def stop(self) -> None:
        """Hang: take requests and do nothing."""
        self._goes_on.clear()

    def go_on(self) -> None:
        self._goes_on.set()

    def slow_down(self, factor: float, probes: float = 0.0) -> None:
        """`probes`: the factor for probes; 0: the same."""
        self.factor, self.probe_factor = factor, probes or factor

    async def answer(self, request: InferenceRequest, say: Callable[[Delta], None]) -> None:
        tokens = request.parameters.max_tokens or 1
        async with self._slot():
            for number in range(tokens):
                factor = self.factor if request.request_id != PROBE else self.probe_factor
                work_s = STEP_S if number else PREFILL_S * len(request.prompt)
                await asyncio.sleep(work_s * factor)
                await self._goes_on.wait()
                last = number == tokens - 1
                say(Delta(" word", "length" if last else None, 1, final=last))

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        if self._running < SLOTS:
            self._running += 1
        else:
            turn = asyncio.Event()
            self._waiting.append(turn)
            try:
                await turn.wait()
            except asyncio.CancelledError:
                if turn in self._waiting:
                    self._waiting.remove(turn)
                    raise
                self._pass_on()
                raise
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        if self._waiting:
            self._waiting.pop(0).set()
        else:
            self._running -= 1


class Client:
    """A gateway's client of a server; the text of each delta is its address."""

    def __init__(self, address: str, server: Server, clock: Callable[[], float]) -> None:
        self._address = address
        self._server = server
        self._clock = clock
        self._heard = -math.inf
        self._streams: set[_Stream] = set()

    async def generate(self, request: InferenceRequest) -> AsyncGenerator[Delta, None]:
        self._server.calls += 1
        async for delta in self._generate(request):
            yield msgspec.structs.replace(delta, text=self._address)

    async def _generate(self, request: InferenceRequest) -> AsyncGenerator[Delta, None]:
        stream = _Stream()
        self._streams.add(stream)
        work = asyncio.ensure_future(self._server.answer(request, stream.deltas.put_nowait))
        try:
            while True:
                try:
                    async with asyncio.timeout_at(request.deadline):
                        delta = await stream.deltas.get()
                except TimeoutError:
                    raise DeadlineExceeded("the request's deadline has passed") from None
                if isinstance(delta, CausewayError):
                    raise delta
                self._heard, stream.begun = self._clock(), True
                yield delta
                if delta.final:
                    return
        finally:
            self._streams.discard(stream)
            work.cancel()

    async def probe(self, model: str, timeout_s: float = 3.0, *, embed: bool = False) -> None:
        parameters = SamplingParameters(max_tokens=1)
        deadline = self._clock() + timeout_s
        request = InferenceRequest(model=model, prompt="a", parameters=parameters, deadline=deadline, request_id=PROBE)
        async for _ in self._generate(request):
            pass

    def last_received_at(self, model: str) -> float:
        return self._heard

    def fail_calls(self, model: str, error: CausewayError, *, begun: bool = True) -> None:
        for stream in [one for one in self._streams if begun or not one.begun]:
            stream.deltas.put_nowait(error)

    def renew(self) -> None: ...


class _Stream:
    def __init__(self) -> None:
        self.begun = False
        self.deltas: asyncio.Queue[Delta | CausewayError] = asyncio.Queue()


class RequestResult(msgspec.Struct):
    """The result of one request; seconds are from its arrival, 0 where it did not get that far."""

    sent_at: float
    ttft_s: float = 0.0
    took_s: float = 0.0
    error: str = ""
    endpoint: str = ""  # the source of its first token


class Gateway:
    """One gateway process."""

    def __init__(self, servers: Sequence[Server], clock: Callable[[], float], chance: random.Random) -> None:
        addresses = [f"t{number}:1" for number in range(len(servers))]
        clients = {address: Client(address, server, clock) for address, server in zip(addresses, servers, strict=True)}
        self._clock = clock
        self.pool = Pool(
            TierEndpoints(TIER, TIER, tuple(parse_endpoint_address(address) for address in clients)),
            lambda address: cast("TritonClient", clients[address]),
            clock=clock,
            rng=chance.random,
        )
        permits = SLOTS * len(servers)
        settings = AdmissionSettings(permits=permits, min_permits=1, max_queued=64)
        self.admission = AdmissionController(
            settings.permits, settings.max_queued, settings, clock=clock, rng=chance.random
        )
        self.dispatch = Dispatcher(self.pool, clock=clock, rng=chance.random, sleep=asyncio.sleep)
        self.fallback = TierFallback(
            DegradationConfig(), {TIER: TierSignals(self.pool, self.admission.scheduler, 2.0)}, clock=clock
        )

    async def send(self, deadline_s: float, prompt: str = "p") -> RequestResult:
        began = self._clock()
        result, deadline = RequestResult(began), began + deadline_s
        call = RequestContext(
            id="1",
            request=Request(kind="chat", model=TIER),
            tier=cast("Tier", None),
            deadline=deadline,
            priority="interactive",
        )
        request = InferenceRequest(
            model=TIER, prompt=prompt, parameters=SamplingParameters(max_tokens=TOKENS), deadline=deadline
        )
        (fallback_step,) = self.fallback.fallback_steps(FallbackRequest(TIER, deadline_s), call.priority)
        runtime = TierRuntime(cast("Tier", None), self.admission, self.dispatch)
        tier_attempt = TierAttempt(self.fallback, fallback_step, runtime, self._clock)
        try:
            async with tier_attempt:
                _, first = await tier_attempt.begin(call, lambda: [request], b"")
                result.ttft_s = self._clock() - began
                result.endpoint = first.text
                assert tier_attempt.stream is not None
                async for _ in tier_attempt.stream:
                    pass
        except TierFailed as tier_failure:
            result.error = tier_failure.error.code
        except CausewayError as error:
            result.error = error.code
        result.took_s = self._clock() - began
        return result


@asynccontextmanager
async def watched(gateways: Sequence[Gateway]) -> AsyncIterator[None]:
    async with anyio.create_task_group() as tasks:
        for gateway in gateways:
            tasks.start_soon(gateway.pool.watch)
        yield
        tasks.cancel_scope.cancel()


async def open_loop(
    gateways: Sequence[Gateway],
    clock: Callable[[], float],
    chance: random.Random,
    per_s: float,
    for_s: float,
    deadline_s: float,
    prompts: Sequence[str] = ("p",),
) -> list[RequestResult]:
    """Return all results of Poisson arrivals, in arrival order; the gateways take turns."""
    tasks: list[asyncio.Task[RequestResult]] = []
    at, ends = clock(), clock() + for_s
    while (at := at + chance.expovariate(per_s)) < ends:
        await asyncio.sleep(max(0.0, at - clock()))
        gateway = gateways[len(tasks) % len(gateways)]
        tasks.append(asyncio.ensure_future(gateway.send(deadline_s, chance.choice(prompts))))
    return [await one for one in tasks]


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
