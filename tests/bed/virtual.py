"""`python -m tests.bench virtual SCENARIO [--without MECHANISM] [--rounds 5]`: the beds in virtual time.

Two gateways' own pools, admission, heartbeats, fallback, dispatchers and service, before servers that are timers; no
sockets, no Redis and no processor that other work could take. Time jumps from event to event, and chance comes from a
seed: with and without a mechanism the same requests arrive at the same moments, and two runs of the same code are
equal. A minute takes a few seconds. What it cannot show is what sockets, parsing and the machine cost.

    overload   three times the capacity, two tiers, three priorities (`tests.bench overload`)
    tenants    one of two tenants floods the tier (`tests.bench tenants`)
    fanout     one of two tenants sends 6 × 128 sequences (`tests.bench fanout`)
    slow       one of three replicas becomes ten times slower, and recovers (`tests.bench slow`)
    hiccups    each of three replicas stops for 0.8 s now and then, every 8 s on average
    joining    a third replica joins, whose first tokens come 2.5 times later for 8 s (cold caches)
    idle       a request every 80 s, to a server whose first token takes 1.5 s more after a minute without work
    stalls     1.2 times the capacity, while the gateways' machine stops for 150 ms twice a second

With `--mixed` prefills and answers vary in length (lognormal, coefficients of variation 0.3 and 0.5). A figure ends in
what is better: `(low)` or `(high)`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, cast

import anyio
import msgspec

from causeway_server.cloud_pool.admission import AdmissionController
from causeway_server.cloud_pool.admission.division import PeerKind
from causeway_server.cloud_pool.admission.peer_heartbeat import PeerHeartbeat, SharedTier
from causeway_server.cloud_pool.app import worker_admission
from causeway_server.cloud_pool.core.request_context import AnswerHead, RequestContext
from causeway_server.cloud_pool.degradation.config import DegradationConfig
from causeway_server.cloud_pool.degradation.fallback import TierFallback, TierSignals, TierWarmer
from causeway_server.cloud_pool.degradation.tier_attempt import TierRuntime
from causeway_server.cloud_pool.dispatch.config import LoadBalancingConfig
from causeway_server.cloud_pool.dispatch.discovery import TierEndpoints
from causeway_server.cloud_pool.dispatch.dispatcher import Dispatcher
from causeway_server.cloud_pool.dispatch.pool import Pool
from causeway_server.cloud_pool.jobs.worker.execution import WorkerSlots
from causeway_server.cloud_pool.observability.metrics import EventLoopLag
from causeway_server.cloud_pool.serving.service import Service
from causeway_server.cloud_pool.tiers.config import TierConfig
from causeway_server.cloud_pool.tiers.tier import ChatFormat, Tier
from causeway_server.cloud_pool.upstreams.inference import Delta, InferenceRequest
from causeway_server.cloud_pool.upstreams.triton.client import TritonClient
from causeway_server.router.errors import CausewayError
from causeway_server.router.types import Message, Request, RoutingHints
from tests.bench.rows import Row
from tests.cloud_pool.dispatch.simulated import PROBE, Client
from tests.virtual_time import run_in_virtual_time

from . import fanout, overload, slow
from .bed import ReplicaSpeed
from .client import RequestResult, new_mark
from .figures import print_figures
from .load import Priority, answers, ttft_ms
from .without import CONFIG, MECHANISMS, PATCHES, Off

TOKENS = 4
SETTLE_S = 10.0
COLD_AFTER_S = 60.0
_JITTER_S = 0.002
_FREED_S = 0.02  # after which the slot of a cancelled sequence is free
_PREFILL_CV, _ANSWER_CV = 0.3, 0.5
_STALL_S, _STALLS_PER_S = 0.15, 2.0
Figures = dict[str, float]


class Server:
    """One replica, as `models/paced.py`: `slots` sequences at once, the others wait in their order."""

    def __init__(self, speed: ReplicaSpeed, chance: random.Random, *, mixed: bool) -> None:
        self.speed = speed
        self.factor = 1.0  # how much slower it is
        self.calls = 0  # without probes
        self.stopped_until = -math.inf  # in the loop's time
        self.cold_s = 0.0  # by which a first token is later after COLD_AFTER_S without work
        self._worked_at = math.inf
        self._mixed = mixed
        self._chance = chance
        self._waiting: list[asyncio.Event] = []
        self._running = 0

    async def answer(self, request: InferenceRequest, say: Callable[[Delta], None]) -> None:
        tokens = request.parameters.max_tokens or 1
        prefill_s = self.speed.prefill_s * self._draw(_PREFILL_CV) + self._chance.expovariate(1.0 / _JITTER_S)
        step_s = self.speed.step_s * self._draw(_ANSWER_CV)
        async with self._slot():
            now = asyncio.get_running_loop().time()
            prefill_s += self.cold_s if now - self._worked_at >= COLD_AFTER_S else 0.0
            self._worked_at = now
            for number in range(tokens):
                await asyncio.sleep((step_s if number else prefill_s) * self.factor)
                await asyncio.sleep(max(0.0, self.stopped_until - asyncio.get_running_loop().time()))
                last = number == tokens - 1
                say(Delta(" word", "length" if last else None, 1, (), 10, last))

    def _draw(self, variation: float) -> float:
        """Draw from a lognormal distribution around 1."""
        sigma = math.sqrt(math.log(1.0 + variation * variation))
        return math.exp(self._chance.gauss(-sigma * sigma / 2.0, sigma)) if self._mixed else 1.0

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        if self._running < self.speed.slots:
            self._running += 1
        else:
            turn = asyncio.Event()
            self._waiting.append(turn)
            try:
                await turn.wait()
            except asyncio.CancelledError:
                if turn in self._waiting:
                    self._waiting.remove(turn)
                else:
                    self._pass_on()
                raise
        try:
            yield
        except asyncio.CancelledError:
            asyncio.get_running_loop().call_later(self._chance.uniform(0.0, _FREED_S), self._pass_on)
            raise
        else:
            self._pass_on()

    def _pass_on(self) -> None:
        if self._waiting:
            self._waiting.pop(0).set()
        else:
            self._running -= 1


class StalledServer:
    """A server as one gateway sees it: nothing is read while that gateway is stalled."""

    def __init__(self, server: Server, stalls: Stalls) -> None:
        self.calls = 0
        self._server = server
        self._stalls = stalls

    async def answer(self, request: InferenceRequest, say: Callable[[Delta], None]) -> None:
        loop = asyncio.get_running_loop()
        self._server.calls += request.request_id != PROBE

        def say_later(delta: Delta) -> None:
            loop.call_at(self._stalls.over_at(), say, delta)

        await self._server.answer(request, say_later)


class Stalls:
    """The moments in which the gateways' machine does something else."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until = -math.inf

    def over_at(self) -> float:
        return max(self._clock(), self._until)

    async def sleep(self, seconds: float) -> None:
        """Sleep, and longer where that ends amid a stall."""
        await asyncio.sleep(seconds)
        await asyncio.sleep(self.over_at() - self._clock())

    async def watch(self, chance: random.Random) -> None:
        while True:
            await asyncio.sleep(chance.expovariate(_STALLS_PER_S))
            self._until = self._clock() + _STALL_S
            await asyncio.sleep(_STALL_S)


class SharedHashes:
    """The part of Redis that heartbeats use, without its expiry: no process dies here."""

    def __init__(self) -> None:
        self._hashes: dict[str, dict[str, bytes]] = {}

    def register_script(self, script: str) -> Callable[..., Awaitable[list[int | bytes]]]:
        async def run(keys: Sequence[str], args: Sequence[Any]) -> list[int | bytes]:
            peers = self._hashes.setdefault(keys[0], {})
            peers[args[0]] = args[1]
            return [0, *(part for name, state in peers.items() for part in (name.encode(), state))]

        return run

    async def hdel(self, key: str, name: str) -> None:
        self._hashes.get(key, {}).pop(name, None)


class Gateway:
    """One gateway process, wired as by `app.build_runtime`, or a worker's serving part."""

    def __init__(self, bed: VirtualBed, number: int, kind: PeerKind = "gateway") -> None:
        clock, chance = bed.clock, random.Random(f"{bed.seed} {kind} {number}")
        self.admissions: dict[str, AdmissionController] = {}
        self._clock = clock
        names = tuple(dict.fromkeys(bed.servers.values()))
        degradation = msgspec.convert(bed.config.get("degradation", {}), DegradationConfig)
        balancing = msgspec.convert(bed.config.get("load_balancing", {}), LoadBalancingConfig)
        self.lag = EventLoopLag(clock=clock, sleep=bed.stalls.sleep)
        self.tiers: dict[str, Tier] = {}
        runtimes: dict[str, TierRuntime] = {}
        pools: dict[str, Pool] = {}
        shared: list[SharedTier] = []
        for name in names:
            servers = [server for server, tier in bed.servers.items() if tier == name]
            clients = {
                f"{name}-{at}:1": Client(f"{name}-{at}:1", cast("Any", StalledServer(server, bed.stalls)), clock)
                for at, server in enumerate(servers)
            }
            config = msgspec.convert(
                {"name": name, "template_file": "x", "endpoints": list(clients), **bed.tier}, TierConfig
            )
            chat_format = ChatFormat("{% for m in messages %}{{ m.content }}{% endfor %}", context_tokens=1000)
            tier = self.tiers[name] = Tier(config, chat_format)
            addresses = list(config.endpoint_addresses)
            pool = pools[name] = Pool(
                TierEndpoints(name, name, tuple(addresses)),
                _client_of(clients),
                settings=balancing,
                clock=clock,
                rng=chance.random,
            )
            settings = config.admission_settings if kind == "gateway" else worker_admission(config)
            admission = self.admissions[name] = AdmissionController(
                settings.permits, settings.max_queued, settings, clock=clock, rng=chance.random, lost_s=self.lag.lost_s
            )
            dispatch = Dispatcher(pool, clock=clock, rng=chance.random, sleep=asyncio.sleep)
            runtimes[name] = TierRuntime(tier, admission, dispatch)
            shared.append(SharedTier(name, config.concurrency, _always(tuple(clients)), _capacity_of(pool), admission))
        signals = {
            name: TierSignals(pools[name], runtime.admission.scheduler, runtime.tier.config.ttft_objective_s)
            for name, runtime in runtimes.items()
        }
        fallback = TierFallback(degradation, signals, clock=clock)
        self.pools = pools
        self.service = Service(runtimes, fallback, clock=clock)
        self.warmer = TierWarmer(
            fallback, pools, dict(zip(names, names, strict=True)), degradation.warm_up_after_idle_s, clock=clock
        )
        client = cast("Any", bed.redis)
        self.heartbeat = PeerHeartbeat(
            client, shared, kind=kind, name=f"{kind}{number}", sleep=asyncio.sleep, clock=clock
        )
        self._start_s = chance.uniform(0.0, 0.5)

    async def watch(self) -> None:
        async with anyio.create_task_group() as tasks:
            for pool in self.pools.values():
                tasks.start_soon(pool.watch)
            tasks.start_soon(self.warmer.watch)
            tasks.start_soon(self.lag.watch)
            await asyncio.sleep(self._start_s)
            tasks.start_soon(self.heartbeat.watch)

    async def send(self, profile: VirtualLoad, request: Request, deadline_s: float, device: int = 0) -> RequestResult:
        now = self._clock()
        result = RequestResult(mark=new_mark(), profile=profile.name, sent_at=now, device=device)
        context = RequestContext(
            id=result.mark,
            request=request,
            tier=self.tiers[request.model],
            deadline=now + deadline_s,
            priority=profile.priority,
            tenant=profile.tenant,
            tokens=10.0 + TOKENS,
        )
        try:
            async with aclosing(self.service.answer(context)) as pieces:
                async for piece in pieces:
                    if isinstance(piece, AnswerHead):
                        result.tier = piece.model
                    elif piece.text and not result.ttft_s:
                        result.ttft_s = self._clock() - now
            result.outcome = "answer"
        except CausewayError as error:
            result.outcome, result.code = "rejected", error.code
        result.ended_at = self._clock()
        return result


class VirtualWorker(Gateway):
    """A worker with an endless backlog of jobs for the first tier: `jobs.worker` without its store."""

    def __init__(self, bed: VirtualBed, number: int) -> None:
        super().__init__(bed, number, "worker")
        self.ended = 0  # jobs
        self._slots = WorkerSlots(next(iter(self.tiers)), 1_000_000, next(iter(self.admissions.values())))

    async def watch(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(super().watch)
            await self.heartbeat.beat()  # The first one takes no permits yet.
            while True:
                await self._slots.wait_for_slot()
                for _ in range(self._slots.free):
                    self._slots.acquire()
                    tasks.start_soon(self._run)

    async def _run(self) -> None:
        load = VirtualLoad(name="jobs", per_s=1.0, tenant="batch", priority="standard")
        message = Message("user", f"job {self.ended}")
        request = Request(kind="chat", model=self._slots.tier, messages=(message,), max_tokens=TOKENS)
        result = await self.send(load, request, 600.0)
        self.ended += result.outcome == "answer"
        if result.outcome != "answer":
            await asyncio.sleep(1.0)
        self._slots.release()


def _client_of(clients: Mapping[str, Client]) -> Callable[[str], TritonClient]:
    return lambda address: cast("TritonClient", clients[address])


def _always(value: tuple[str, ...]) -> Callable[[], Sequence[str]]:
    return lambda: value


def _capacity_of(pool: Pool) -> Callable[[], Any]:
    return lambda: pool.capacity


class VirtualLoad(msgspec.Struct, frozen=True, kw_only=True):
    """As `load.LoadProfile`."""

    name: str
    per_s: float
    tenant: str
    tier: str = "assistant-large"
    priority: Priority = "interactive"
    devices: int = 0
    deadline_s: float = 10.0


class VirtualBed:
    """Two gateways before servers.

    Args:
        servers: the tier of each server, in the order of the fallback.
        without: a mechanism that is off, by its configuration; patches are made before.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        seed: int,
        servers: Iterable[str],
        speed: ReplicaSpeed,
        tier: dict[str, Any],
        *,
        config: dict[str, Any] | None = None,
        without: str = "",
        mixed: bool = False,
        workers: int = 0,
    ) -> None:
        off = CONFIG.get(without, Off())
        self.clock = clock
        self.seed = seed
        self.tier = tier | off.tier
        self.config = (config or {}) | {
            section: (config or {}).get(section, {}) | keys for section, keys in off.top.items()
        }
        chance = random.Random(f"{seed} servers")
        self.servers = {Server(speed, chance, mixed=mixed): name for name in servers}
        self.redis = SharedHashes()
        self.stalls = Stalls(clock)
        self.gateways = [Gateway(self, number) for number in range(2)]
        self.workers = [VirtualWorker(self, number) for number in range(workers)]
        self._marks = itertools.count()

    async def open_loop(self, profiles: Sequence[VirtualLoad], for_s: float, seed: int = 1) -> list[RequestResult]:
        """As `load.open_loop`: arrivals depend on the seed and the profile alone."""
        results: list[RequestResult] = []

        async def send_one(profile: VirtualLoad, number: int, device: int) -> None:
            gateway = self.gateways[(device if profile.devices else number) % 2]
            hints = RoutingHints(client=f"kiosk-{device}" if profile.devices else "")
            message = Message("user", f"turn on the light {next(self._marks)}")
            request = Request(
                kind="chat", model=profile.tier, messages=(message,), max_tokens=TOKENS, hints=hints, stream=True
            )
            await asyncio.sleep(max(0.0, self.stalls.over_at() - self.clock()))
            results.append(await gateway.send(profile, request, profile.deadline_s, device))

        async def arrivals(profile: VirtualLoad, tasks: asyncio.TaskGroup) -> None:
            rng = random.Random(f"{self.seed} {seed} {profile.name}")
            at = self.clock()
            ends = at + for_s
            for number in itertools.count():
                at += rng.expovariate(profile.per_s)
                if at >= ends:
                    return
                device = rng.randrange(profile.devices) if profile.devices else 0
                await asyncio.sleep(max(0.0, at - self.clock()))
                tasks.create_task(send_one(profile, number, device))

        async with asyncio.TaskGroup() as tasks:
            for profile in profiles:
                tasks.create_task(arrivals(profile, tasks))
        return sorted(results, key=lambda each: each.sent_at)

    @asynccontextmanager
    async def fan_outs(self, parallel: int, tenant: str) -> AsyncIterator[list[RequestResult]]:
        """Keep `parallel` fan-outs in progress."""
        results: list[RequestResult] = []
        profile = VirtualLoad(name="fan-out", per_s=1.0, tenant=tenant)

        async def client(gateway: Gateway) -> None:
            while True:
                prompts = tuple(f"turn on the light {next(self._marks)} {at}" for at in range(fanout.PROMPTS))
                request = Request(
                    kind="completion", model=profile.tier, prompts=prompts, n=fanout.CHOICES, max_tokens=TOKENS
                )
                results.append(await gateway.send(profile, request, fanout.DEADLINE_S))
                if results[-1].outcome != "answer":
                    await asyncio.sleep(0.1)

        tasks = [asyncio.ensure_future(client(self.gateways[number % 2])) for number in range(parallel)]
        try:
            yield results
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


# --- scenarios -------------------------------------------------------------------------------------------------------


def capacity(speed: ReplicaSpeed, servers: int = 1) -> float:
    return servers * speed.slots / (speed.prefill_s + (TOKENS - 1) * speed.step_s)


def p99s(results: list[RequestResult]) -> tuple[float, float]:
    """Return the p99 to the first token and of the answer, ms."""
    return ttft_ms(answers(results), 0.99), slow.duration_ms(results, 0.99)


def of(results: list[RequestResult], profile: str) -> list[RequestResult]:
    return [each for each in results if each.profile == profile]


async def play_overload(make: MakeBed) -> Figures:
    speed = overload.SPEED
    tier = {"concurrency": 16, "max_queued": 64, "ttft_objective_s": 2 * speed.prefill_s}
    bed = make(overload.TIERS, speed, tier, {"degradation": {"tiers": overload.TIERS}})
    full = capacity(speed)
    few = VirtualLoad(name="interactive", per_s=4.0, tenant="acme", devices=overload.DEVICES)
    unloaded = await bed.open_loop((few,), 30.0)
    profiles = (
        msgspec.structs.replace(few, per_s=0.5 * full),
        msgspec.structs.replace(few, name="standard", per_s=0.5 * full, priority="standard"),
        msgspec.structs.replace(few, name="bulk", per_s=2.0 * full, priority="bulk"),
    )
    start, stop = bed.clock() + SETTLE_S, bed.clock() + 60.0
    under = await bed.open_loop(profiles, 60.0)
    ended = [each for each in answers(under) if start <= each.ended_at < stop]
    interactive, standard = of(under, "interactive"), of(under, "standard")
    minutes = (stop - start) / 60.0
    return {
        "goodput of capacity (high)": len(ended) / (stop - start) / full,
        "interactive p99 first token, ms (low)": ttft_ms(answers(interactive), 0.99),
        "times unloaded (low)": ttft_ms(answers(interactive), 0.99) / ttft_ms(answers(unloaded), 0.99),
        "interactive not answered (low)": 1.0 - len(answers(interactive)) / len(interactive),
        "standard p99 first token, ms (low)": ttft_ms(answers(standard), 0.99),
        "standard not answered (low)": 1.0 - len(answers(standard)) / len(standard),
        "interactive on its tier (high)": sum(each.tier == overload.TIERS[0] for each in interactive)
        / len(interactive),
        "standard device's changes a minute (low)": overload.device_changes(standard, start, stop) / minutes,
        "sides of standard a minute (low)": overload.side_changes(standard, start, stop) / minutes,
    }


async def play_tenants(make: MakeBed) -> Figures:
    speed = overload.SPEED
    bed = make(("assistant-large",), speed, {"concurrency": speed.slots, "max_queued": 64}, {})
    full = capacity(speed)
    quiet = VirtualLoad(name="quiet", per_s=0.2 * full, tenant="quiet")
    other = VirtualLoad(name="other", per_s=0.2 * full, tenant="loud")
    flood = msgspec.structs.replace(other, name="flood", per_s=3.0 * full)
    await bed.open_loop((quiet, other), 5.0)
    in_calm: list[RequestResult] = []
    in_flood: list[RequestResult] = []
    for turn in (1, 2):
        in_calm += await bed.open_loop((quiet, other), 40.0, turn)
        in_flood += await bed.open_loop((quiet, flood), 40.0, turn)
        await bed.open_loop((quiet, other), 5.0)
    return _beside(of(in_calm, "quiet"), of(in_flood, "quiet")) | {
        "answered of capacity (high)": len(answers(in_flood)) / 80.0 / full
    }


async def play_fanout(make: MakeBed) -> Figures:
    speed = overload.SPEED
    bed = make(("assistant-large",), speed, {"concurrency": speed.slots, "max_queued": 1024}, {})
    quiet = VirtualLoad(name="quiet", per_s=0.2 * capacity(speed), tenant="quiet")
    await bed.open_loop((quiet,), 5.0)
    in_calm: list[RequestResult] = []
    attacked: list[RequestResult] = []
    done = 0
    for turn in (1, 2):
        in_calm += await bed.open_loop((quiet,), 40.0, turn)
        async with bed.fan_outs(fanout.PARALLEL, "loud") as results:
            attacked += await bed.open_loop((quiet,), 40.0, turn)
            done += len(answers(results))
        await bed.open_loop((quiet,), 5.0)
    return _beside(in_calm, attacked) | {"fan-outs answered (high)": float(done)}


def _beside(in_calm: list[RequestResult], under: list[RequestResult]) -> Figures:
    before, after = p99s(in_calm), p99s(under)
    return {
        "calm: p99 first token, ms (low)": before[0],
        "p99 first token, ms (low)": after[0],
        "p99 first token, times calm (low)": after[0] / before[0],
        "p99 answer, times calm (low)": after[1] / before[1],
        "not answered (low)": 1.0 - len(answers(under)) / len(under),
    }


async def play_slow(make: MakeBed) -> Figures:
    speed = slow.SPEED
    bed = make(("assistant-large",) * 3, speed, {"concurrency": speed.slots, "max_queued": 64}, {})
    load = VirtualLoad(name="interactive", per_s=0.35 * capacity(speed, 3), tenant="acme", deadline_s=15.0)
    await bed.open_loop((load,), SETTLE_S)
    healthy = await bed.open_loop((load,), 60.0)
    victim = list(bed.servers)[1]
    before = victim.calls
    victim.factor = 10.0
    slowed = await bed.open_loop((load,), 60.0, 2)
    calls = victim.calls - before
    victim.factor = 1.0
    await asyncio.sleep(5.0)
    recovering = await bed.open_loop((load,), 40.0, 3)
    base, during, after = p99s(healthy), p99s(slowed), p99s(recovering)
    return {
        "p99 first token, times healthy (low)": during[0] / base[0],
        "p99 answer, times healthy (low)": during[1] / base[1],
        "calls that the slow replica got (low)": calls / len(slowed),
        "recovering: p99 first token (low)": after[0] / base[0],
        "healthy: p99 first token, ms (low)": base[0],
        "one slow: p99 first token, ms (low)": during[0],
    }


async def play_stalls(make: MakeBed) -> Figures:
    speed = overload.SPEED
    bed = make(("assistant-large",), speed, {"concurrency": speed.slots, "max_queued": 64}, {})
    full = capacity(speed)
    load = VirtualLoad(name="interactive", per_s=1.2 * full, tenant="acme")
    stalls = asyncio.ensure_future(bed.stalls.watch(random.Random(f"{bed.seed} stalls")))
    await bed.open_loop((load,), SETTLE_S)
    results = await bed.open_loop((load,), 60.0)
    stalls.cancel()
    await asyncio.gather(stalls, return_exceptions=True)
    return {
        "answered of capacity (high)": len(answers(results)) / 60.0 / full,
        "p50 first token, ms (low)": ttft_ms(answers(results), 0.5),
        "p99 first token, ms (low)": ttft_ms(answers(results), 0.99),
    }


async def play_hiccups(make: MakeBed) -> Figures:
    speed = slow.SPEED
    bed = make(("assistant-large",) * 3, speed, {"concurrency": speed.slots, "max_queued": 64}, {})
    load = VirtualLoad(name="interactive", per_s=0.35 * capacity(speed, 3), tenant="acme", deadline_s=15.0)

    async def stop_now_and_then(server: Server, chance: random.Random) -> None:
        while True:
            await asyncio.sleep(chance.expovariate(1.0 / 8.0))
            server.stopped_until = bed.clock() + 0.8

    stops = [
        asyncio.ensure_future(stop_now_and_then(server, random.Random(f"{bed.seed} hiccups {number}")))
        for number, server in enumerate(bed.servers)
    ]
    await bed.open_loop((load,), SETTLE_S)
    results = await bed.open_loop((load,), 60.0)
    for stop in stops:
        stop.cancel()
    await asyncio.gather(*stops, return_exceptions=True)
    return {
        "p95 first token, ms (low)": ttft_ms(answers(results), 0.95),
        "p99 first token, ms (low)": ttft_ms(answers(results), 0.99),
        "p99 answer, ms (low)": slow.duration_ms(results, 0.99),
    }


async def play_joining(make: MakeBed) -> Figures:
    speed = slow.SPEED
    bed = make(("assistant-large",) * 3, speed, {"concurrency": speed.slots, "max_queued": 64}, {})
    load = VirtualLoad(name="interactive", per_s=0.35 * capacity(speed, 3), tenant="acme", deadline_s=15.0)
    names = [f"assistant-large-{number}:1" for number in range(3)]
    for gateway in bed.gateways:
        gateway.pools[load.tier].set_endpoints(dict.fromkeys(names[:2], ""))
    await bed.open_loop((load,), 2 * SETTLE_S)
    cold = list(bed.servers)[2]
    cold.factor = 2.5
    asyncio.get_running_loop().call_later(8.0, vars(cold).__setitem__, "factor", 1.0)
    for gateway in bed.gateways:
        gateway.pools[load.tier].set_endpoints(dict.fromkeys(names, ""))
    results = await bed.open_loop((load,), 20.0, 2)
    return {
        "p95 first token, ms (low)": ttft_ms(answers(results), 0.95),
        "p99 first token, ms (low)": ttft_ms(answers(results), 0.99),
        "p99 answer, ms (low)": slow.duration_ms(results, 0.99),
    }


async def play_idle(make: MakeBed) -> Figures:
    speed = overload.SPEED
    tier = {"concurrency": speed.slots, "max_queued": 64, "ttft_objective_s": 2 * speed.prefill_s}
    bed = make(overload.TIERS, speed, tier, {"degradation": {"tiers": overload.TIERS}})
    for server in bed.servers:
        server.cold_s = 1.5
    load = VirtualLoad(name="interactive", per_s=4.0, tenant="acme")
    await bed.open_loop((load,), SETTLE_S)
    results: list[RequestResult] = []
    for turn in range(20):
        await asyncio.sleep(80.0)
        results += (await bed.open_loop((load,), 2.0, turn + 2))[:1]
    return {
        "mean first token, ms (low)": 1000.0 * sum(each.ttft_s for each in results) / len(results),
        "on its tier (high)": sum(each.tier == overload.TIERS[0] for each in results) / len(results),
    }


MakeBed = Callable[[Iterable[str], ReplicaSpeed, dict[str, Any], dict[str, Any]], VirtualBed]
SCENARIOS: dict[str, Callable[[MakeBed], Awaitable[Figures]]] = {
    "overload": play_overload,
    "tenants": play_tenants,
    "fanout": play_fanout,
    "slow": play_slow,
    "hiccups": play_hiccups,
    "joining": play_joining,
    "idle": play_idle,
    "stalls": play_stalls,
}


TIMES = {
    "interactive p99 first token, ms (low)",
    "calm: p99 first token, ms (low)",
    "p99 first token, ms (low)",
    "one slow: p99 first token, ms (low)",
    "healthy: p99 first token, ms (low)",
}


def run(scenario: str, seed: int, *, without: str = "", mixed: bool = False, workers: int = 0) -> Figures:
    """Play a scenario once."""

    async def main(clock: Callable[[], float]) -> Figures:
        beds: list[VirtualBed] = []
        watches: list[asyncio.Task[None]] = []

        def make(
            servers: Iterable[str], speed: ReplicaSpeed, tier: dict[str, Any], config: dict[str, Any]
        ) -> VirtualBed:
            more: dict[str, Any] = {"config": config, "without": without, "mixed": mixed, "workers": workers}
            bed = VirtualBed(clock, seed, servers, speed, tier, **more)
            beds.append(bed)
            watches.extend(asyncio.ensure_future(each.watch()) for each in (*bed.gateways, *bed.workers))
            return bed

        try:
            figures = await SCENARIOS[scenario](make)
            return figures | ({"jobs ended (high)": float(sum(w.ended for w in beds[0].workers))} if workers else {})
        finally:
            for task in watches:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*watches, return_exceptions=True)

    return run_in_virtual_time(main)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("scenario", choices=SCENARIOS)
    parser.add_argument("--without", choices=MECHANISMS, default="", help="a mechanism that is off")
    parser.add_argument("--rounds", type=int, default=5, help="seeds 1, 2 …")
    parser.add_argument("--mixed", action="store_true", help="prefills and answers of several lengths")
    parser.add_argument("--workers", type=int, default=0, help="once more beside so many workers with endless jobs")


def main(arguments: argparse.Namespace) -> list[Row]:
    PATCHES.get(arguments.without, lambda: None)()
    for seed in range(1, arguments.rounds + 1):
        found = run(arguments.scenario, seed, without=arguments.without, mixed=arguments.mixed)
        if arguments.workers:
            alone = found
            found = run(
                arguments.scenario, seed, without=arguments.without, mixed=arguments.mixed, workers=arguments.workers
            )
            times = {
                name.replace(", ms", ", times without jobs"): found[name] / alone[name] for name in TIMES & alone.keys()
            }
            found = times | {"jobs ended (high)": found["jobs ended (high)"]}
        print_figures(found)
    return []
