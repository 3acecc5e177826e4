"""One tier's endpoints, and the leases on them. Owner of the tier's PoolState; what is decided about it is pure."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence

import anyio
import msgspec
from anyio.abc import TaskGroup

from router.errors import (
    CausewayError,
    CloudTimeout,
    CloudUnreachable,
    DeadlineExceeded,
    EngineUnavailable,
    StreamBroken,
)

from ..upstreams.triton.client import TritonClient
from . import health, slowness
from .config import LoadBalancing, LoadBalancingConfig, relapse_s
from .discovery.endpoint_address import EndpointAddress
from .endpoint_selection import choose
from .lease import Lease as Lease
from .state import Endpoint, Phase, PoolState, without

RETRY_S = 1.0
_LONGEST_RETRY_S = 5.0
_TICK_S = 0.1
_UNREACHED = (CloudUnreachable.code, DeadlineExceeded.code, CloudTimeout.code)
_log = logging.getLogger("causeway.cloud.pool")


class EndpointView(msgspec.Struct, frozen=True):
    """What others may know of an endpoint."""

    address: str
    zone: str
    phase: Phase
    outstanding: int
    ttft_s: float  # recent, to the first token; 0: not measured
    slow: bool  # several times slower than its peers
    fault: str  # code of the last error, "" when an answer came since


class Pool:
    """`client` gives the Triton of an address; `chance` draws from [0, 1); `zone` is the gateway's own.

    Endpoints are asked, and let back in, while `watch` runs.
    """

    def __init__(
        self,
        tier: str,
        model: str,
        places: Sequence[EndpointAddress],
        client: Callable[[str], TritonClient],
        *,
        settings: LoadBalancingConfig = LoadBalancingConfig(),  # noqa: B008  (frozen)
        load_balancing: LoadBalancing = "least_loaded",
        zone: str = "",
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
        ejected: Callable[[str, str], None] = lambda tier, code: None,
    ) -> None:
        self.tier = tier
        self.model = model
        self._client = client
        self._settings = settings
        self._balance = load_balancing
        self._zone = zone
        self._clock = clock
        self._chance = chance
        self._ejected = ejected
        self._to_ask: list[str] = []
        self._wake = anyio.Event()
        self._state = PoolState()
        self.name({place.address: place.zone for place in places})

    @property
    def healthy(self) -> int:
        """How many endpoints take requests."""
        return self._state.healthy

    @property
    def endpoints(self) -> Sequence[EndpointView]:
        return tuple(_view(one) for one in self._state.endpoints)

    @property
    def state(self) -> PoolState:
        return self._state

    def name(self, zones: Mapping[str, str]) -> None:
        """The addresses there are from now on, each with its zone. Who is left out, drains."""
        self._become(health.renamed(self._state, zones, self._clock()))
        self._wake.set()

    # --- leases ------------------------------------------------------------------------------------------------------

    def lease(self, *, key: bytes = b"", excluding: Collection[str] = ()) -> Lease:
        """The endpoint for the next call, counted as outstanding from now on: use it as a context manager.

        `key` says which prefix the call has (`prefix.key_of`); addresses in `excluding` are not given. Raises
        CloudUnreachable or EngineUnavailable, with the time after which to ask again.
        """
        now = self._clock()
        key = key if self._balance == "prefix_affinity" else b""
        chosen = choose(
            self._state,
            self._settings,
            now=now,
            draw=self._chance(),
            key=key,
            excluding=excluding,
            zone=self._zone,
        )
        if chosen is None:
            raise self._nobody()
        taken = msgspec.structs.replace(chosen, open=(*chosen.open, now), waiting=(*chosen.waiting, now))
        self._state = self._state.put(taken)
        return Lease(self, chosen.address, self._client(chosen.address), now)

    def on_first_token(self, lease: Lease, seconds: float) -> None:
        one = self._state.get(lease.endpoint)
        if one is not None:
            self._state = self._state.put(msgspec.structs.replace(one, waiting=without(one.waiting, lease.began_at)))
            self._state = slowness.measured(self._state, lease.endpoint, seconds, self._clock(), self._settings)

    def on_success(self, lease: Lease) -> None:
        self._state = health.succeeded(self._state, lease.endpoint)

    def on_error(self, lease: Lease, error: CausewayError) -> None:
        now, silent_s = self._clock(), self._silent_s(lease)
        if health.fault_kind_of(error) == "late":
            self._gave_up(lease)
        self._do(health.failed(self._state, lease.endpoint, error, now, self._settings, silent_s=silent_s))

    def on_close(self, lease: Lease) -> None:
        if not (lease.heard or lease.told):
            self._gave_up(lease)
            silent_s = self._silent_s(lease)
            self._do(health.left_waiting(self._state, lease.endpoint, self._settings, silent_s=silent_s))
        one = self._state.get(lease.endpoint)
        if one is not None:
            one = msgspec.structs.replace(
                one, open=without(one.open, lease.began_at), waiting=without(one.waiting, lease.began_at)
            )
            self._become(health.settled(self._state.put(one)))

    def is_slow(self, lease: Lease) -> bool:
        one = self._state.get(lease.endpoint)
        return one is not None and slowness.is_slow(self._state, one, self._clock(), self._settings)

    def _gave_up(self, lease: Lease) -> None:
        """The time that was waited in vain is known; without it the slow would look as quick as they are not."""
        if not lease.heard:
            now = self._clock()
            waited_s = now - lease.began_at
            self._state = slowness.given_up(self._state, lease.endpoint, waited_s, now, self._settings)

    def _silent_s(self, lease: Lease) -> float:
        """How long nothing at all came from the lease's endpoint, whoever waited there; at most the lease's age."""
        return self._clock() - max(lease.began_at, lease.triton.last_received_at(self.model))

    def _nobody(self) -> CausewayError:
        # Who failed in any other way than by silence was reached.
        reached = any(one.fault and one.fault not in _UNREACHED for one in self._state.members)
        kind = EngineUnavailable if reached else CloudUnreachable
        # The longer they are away, the later they are expected; but once one is back, callers should not be far.
        away = [relapse_s(one.silences, self._settings) for one in self._state.members if one.phase == "ejected"]
        after_s = min(max(RETRY_S, min(away, default=RETRY_S)), _LONGEST_RETRY_S)
        return kind(f"no endpoint of {self.tier} can take the request", phase="connect", retry_after_s=after_s)

    # --- health ------------------------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """For as long as the pool is used: asks the ejected and the silent, and ends calls that hang."""
        async with anyio.create_task_group() as tasks:
            while True:
                self._look(tasks)
                self._wake = anyio.Event()
                with anyio.move_on_after(_TICK_S):
                    await self._wake.wait()

    async def check(self) -> Mapping[str, str]:
        """Asks each endpoint that is named, all at once: the code of its error, "" where it answered."""
        found: dict[str, str] = {}

        async def ask(address: str) -> None:
            try:
                await self._client(address).probe(self.model)
                found[address] = ""
            except CausewayError as error:
                found[address] = error.code

        async with anyio.create_task_group() as tasks:
            for one in self._state.members:
                tasks.start_soon(ask, one.address)
        return {address: found[address] for address in sorted(found)}

    def _look(self, tasks: TaskGroup) -> None:
        now = self._clock()
        self._do(health.due_probes(self._state, now, self._settings, self._heard_at))
        asked, self._to_ask = self._to_ask, []
        for address in asked:
            tasks.start_soon(self._ask, address)
        for address in health.stranded(self._state, now, self._settings, self._heard_at):
            why = CloudUnreachable("the endpoint hangs", phase="first_token", retry_after_s=RETRY_S)
            self._client(address).end(self.model, why, begun=False)
        for address in health.hung(self._state, now, self._settings, self._heard_at):
            broken = StreamBroken("the endpoint hangs", phase="stream", retry_after_s=RETRY_S)
            self._client(address).end(self.model, broken)

    async def _ask(self, address: str) -> None:
        began, triton = self._clock(), self._client(address)
        error: CausewayError | None = None
        try:
            await triton.probe(self.model, self._settings.probe_timeout_s)
        except CausewayError as raised:
            error = raised
        finally:
            self._state = health.probe_abandoned(self._state, address)
        probe_result = health.probe_result_of(error, triton.last_received_at(self.model) >= began)
        if probe_result == "dead" and isinstance(error, DeadlineExceeded):
            triton.renew()  # It may be the connection that is dead.
        code = "" if error is None else error.code
        now = self._clock()
        self._become(health.probed(self._state, address, probe_result, code, now, self._settings, took_s=now - began))

    def _heard_at(self, address: str) -> float:
        return self._client(address).last_received_at(self.model)

    def _do(self, changed: health.Changed) -> None:
        state, to_ask = changed
        self._become(state)
        if to_ask:
            self._to_ask.extend(to_ask)
            self._wake.set()

    def _become(self, state: PoolState) -> None:
        """Says what changed, for people."""
        before = {one.address: one for one in self._state.endpoints}
        self._state = state
        for one in state.endpoints:
            old = before.pop(one.address, None)
            if old is not None and old.phase == one.phase:
                continue
            if one.phase == "ejected" and one.fault:
                self._ejected(self.tier, one.fault)
                _log.warning("%s: %s is ejected: %s", self.tier, one.address, one.fault)
            elif old is not None:
                _log.info("%s: %s was %s, is %s", self.tier, one.address, old.phase, one.phase)
        for address in before:
            _log.info("%s: %s is gone", self.tier, address)


def _view(one: Endpoint) -> EndpointView:
    return EndpointView(one.address, one.zone, one.phase, one.outstanding, one.ttft_s, one.slow, one.fault)
