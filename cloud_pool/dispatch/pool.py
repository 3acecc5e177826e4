"""The pools of all tiers: each owns the state of its endpoints and the leases on them, and they share clients.

Decide, then act: `endpoint_selection` and `health` are pure functions of a PoolState. They return the endpoints to
probe, and `Pool`, the only owner of the state, probes them.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import anyio
import msgspec
from anyio.abc import TaskGroup

from causeway_server.router import errors
from causeway_server.router.serving.tls.contexts import client_tls

from ..upstreams.clients import UpstreamClients
from ..upstreams.config import UpstreamConfig
from ..upstreams.inference import PROBE_S, Upstream
from ..upstreams.openai_http import upstream_tls
from ..upstreams.server_load import LoadReader
from . import health
from .config import LoadBalancingConfig, ejection_s
from .discovery import EndpointAddress, EndpointDiscovery, Resolver, TierEndpoints, resolve_dns
from .endpoint_selection import (
    NO_PROMPT,
    Endpoint,
    PoolCapacity,
    PoolState,
    Prompt,
    capacity_of,
    choose,
    first_token_measured,
    load_reported,
    prefill_measured,
    wait_abandoned,
    without,
)
from .prefix_index import PrefixIndex

RETRY_S = 1.0
_MAX_RETRY_S = 5.0
_TICK_S = 0.1
_UNREACHED = (errors.CloudUnreachable.code, errors.DeadlineExceeded.code, errors.CloudTimeout.code)
log = logging.getLogger(__name__)
_PREPARE_S = 3.0


class Lease:
    """The right to one call on one endpoint, outstanding until it is closed.

    Report `first_token` when it comes, and then at most one of `succeeded` and `failed`; a caller that leaves reports
    neither. Later reports of the same kind are ignored.
    """

    def __init__(self, pool: Pool, endpoint: str, upstream: Upstream, now: float, tokens: int = 0) -> None:
        """Create the lease. `tokens`: estimated tokens of the prompt."""
        self.endpoint = endpoint
        self.upstream = upstream
        self.began_at = now
        self.tokens = tokens
        self.has_first_token = False
        self.has_outcome = False
        self._pool = pool
        self._closed = False

    def first_token(self, seconds: float) -> None:
        """Report the first token, `seconds` after the call started on this endpoint."""
        if not (self.has_first_token or self._closed):
            self.has_first_token = True
            self._pool.on_first_token(self, seconds)

    def succeeded(self) -> None:
        """Report that the whole answer arrived."""
        if not (self.has_outcome or self._closed):
            self.has_outcome = True
            self._pool.on_success(self)

    def failed(self, error: errors.CausewayError) -> None:
        """Report any error of the call; the pool decides whether it counts against the endpoint."""
        if not (self.has_outcome or self._closed):
            self.has_outcome = True
            self._pool.on_error(self, error)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._pool.on_close(self)


class Pool(msgspec.Struct):
    """A tier's endpoints, which are probed and readmitted while `watch` runs."""

    configured: TierEndpoints
    client: Callable[[str], Upstream]  # of an address
    settings: LoadBalancingConfig = LoadBalancingConfig()
    zone: str = ""  # the gateway's own, "" for none
    clock: Callable[[], float] = time.monotonic  # s
    rng: Callable[[], float] = random.random  # draws from [0, 1)
    ejected: Callable[[str, str], None] = lambda tier, code: None  # gets the tier and error code of each ejection
    state: PoolState = PoolState()
    to_probe: list[str] = []
    wake: anyio.Event = msgspec.field(default_factory=anyio.Event)
    prefixes: PrefixIndex = msgspec.field(default_factory=PrefixIndex)
    loads: LoadReader | None = None  # reads what the servers report; None: they are not asked

    def __post_init__(self) -> None:
        self.set_endpoints(
            {endpoint.address: endpoint.zone for endpoint in self.configured.addresses if not endpoint.is_dns}
        )

    @property
    def healthy(self) -> int:
        """Number of active endpoints."""
        return self.state.healthy

    @property
    def capacity(self) -> PoolCapacity:
        return capacity_of(self.state)

    @property
    def endpoints(self) -> Sequence[Endpoint]:
        return self.state.endpoints

    def set_endpoints(self, zones: Mapping[str, str]) -> None:
        """Replace the addresses, each with its zone. Endpoints that are left out drain."""
        self._set_state(health.with_endpoints(self.state, zones, self.clock()))
        self.wake.set()

    # --- leases ------------------------------------------------------------------------------------------------------

    def lease(self, *, prompt: Prompt = NO_PROMPT, excluding: Collection[str] = ()) -> Lease:
        """Select the endpoint of the next call, counted as outstanding until the lease is closed.

        `prompt`: the endpoint may prefill it in silence. Raises CloudUnreachable or EngineUnavailable, with
        `retry_after_s`.
        """
        now = self.clock()
        chosen = choose(
            self.state,
            self.settings,
            now=now,
            draw=self.rng(),
            prompt=prompt,
            cached=self.prefixes.cached_tokens(prompt.blocks) if prompt.blocks else {},
            excluding=excluding,
            zone=self.zone,
        )
        if chosen is None:
            raise self._no_endpoint_error()
        if prompt.blocks:
            self.prefixes.record(chosen.address, prompt.blocks)
        self.state = self.state.replace(
            msgspec.structs.replace(
                chosen,
                open_since=(*chosen.open_since, now),
                waiting_since=(*chosen.waiting_since, now),
                waiting_tokens=chosen.waiting_tokens + prompt.tokens,
            )
        )
        return Lease(self, chosen.address, self.client(chosen.address), now, prompt.tokens)

    def on_first_token(self, lease: Lease, seconds: float) -> None:
        endpoint = self.state.get(lease.endpoint)
        if endpoint is not None:
            state = self.state.replace(_waits_no_more(endpoint, lease))
            state = prefill_measured(state, lease.endpoint, lease.tokens, seconds)
            now = self.clock()
            self.state = first_token_measured(state, lease.endpoint, seconds, now, self.settings)

    def on_success(self, lease: Lease) -> None:
        self.state = health.call_succeeded(self.state, lease.endpoint)

    def on_error(self, lease: Lease, error: errors.CausewayError) -> None:
        now, silent_s = self.clock(), self._silent_s(lease)
        if health.fault_kind_of(error) == "timeout":
            self._record_wait(lease)
        self._apply(health.call_failed(self.state, lease.endpoint, error, now, self.settings, silent_s=silent_s))

    def on_close(self, lease: Lease) -> None:
        if not (lease.has_first_token or lease.has_outcome):
            self._record_wait(lease)
            silent_s = self._silent_s(lease)
            self._apply(health.call_abandoned(self.state, lease.endpoint, self.settings, silent_s=silent_s))
        endpoint = self.state.get(lease.endpoint)
        if endpoint is not None:
            endpoint = endpoint if lease.has_first_token else _waits_no_more(endpoint, lease)
            endpoint = msgspec.structs.replace(endpoint, open_since=without(endpoint.open_since, lease.began_at))
            self._set_state(health.without_drained(self.state.replace(endpoint)))

    def _record_wait(self, lease: Lease) -> None:
        """Record the time waited without a first token; otherwise a slow endpoint would look faster than it is."""
        if not lease.has_first_token:
            now = self.clock()
            waited_s = now - lease.began_at
            self.state = wait_abandoned(self.state, lease.endpoint, waited_s, now, self.settings)

    def _silent_s(self, lease: Lease) -> float:
        """Return how long the lease's endpoint has sent no data to any call; at most the lease's age."""
        return self.clock() - max(lease.began_at, lease.upstream.last_received_at(self.configured.model))

    def _no_endpoint_error(self) -> errors.CausewayError:
        # An endpoint whose last error is anything but silence was reached.
        reached = any(endpoint.last_error and endpoint.last_error not in _UNREACHED for endpoint in self.state.members)
        error_class = errors.EngineUnavailable if reached else errors.CloudUnreachable
        # The longer endpoints are away, the later they are expected; but once one is back, callers should not be far.
        pauses = [
            ejection_s(endpoint.failed_probes, self.settings)
            for endpoint in self.state.members
            if endpoint.phase == "ejected"
        ]
        retry_after_s = min(max(RETRY_S, min(pauses, default=RETRY_S)), _MAX_RETRY_S)
        return error_class(
            f"No endpoint of {self.configured.tier} can take the request.", phase="connect", retry_after_s=retry_after_s
        )

    # --- health ------------------------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Probe ejected, slow and silent endpoints and end calls that hang, until cancelled."""
        async with anyio.create_task_group() as tasks:
            if self.loads is not None:
                tasks.start_soon(self._watch_loads, self.loads)
            while True:
                self._start_probes(tasks)
                self._end_hanging_calls()
                self.wake = anyio.Event()
                with anyio.move_on_after(_TICK_S):
                    await self.wake.wait()

    async def _watch_loads(self, reader: LoadReader) -> None:
        try:
            while True:
                found = await reader.read([each.address for each in self.state.endpoints if each.phase == "active"])
                for endpoint in self.state.endpoints:
                    self.state = load_reported(self.state, endpoint.address, found.get(endpoint.address))
                for address, load in found.items():
                    self.prefixes.set_room(address, load.kv_tokens)
                await anyio.sleep(self.settings.metrics_interval_s)
        finally:
            reader.close()

    async def check(self) -> Mapping[str, str]:
        """Probe every listed endpoint concurrently; return error codes by address, "" where it answered or works."""
        codes: dict[str, str] = {}
        timeout_s = max(PROBE_S, self.settings.probe_timeout_s)

        async def probe(address: str) -> None:
            try:
                await self.client(address).probe(self.configured.model, timeout_s, embed=self.configured.only_embeds)
                codes[address] = ""
            except errors.CausewayError as error:
                codes[address] = "" if self._is_busy(address, error) else error.code

        async with anyio.create_task_group() as tasks:
            for endpoint in self.state.members:
                tasks.start_soon(probe, endpoint.address)
        return {address: codes[address] for address in sorted(codes)}

    def _is_busy(self, address: str, error: errors.CausewayError) -> bool:
        endpoint = self.state.get(address)
        works = endpoint is not None and endpoint.phase == "active" and bool(endpoint.open_since)
        return works and health.fault_kind_of(error) == "timeout"

    def _start_probes(self, tasks: TaskGroup) -> None:
        self._apply(health.due_probes(self.state, self.clock(), self.settings, self._last_received_at))
        due, self.to_probe = self.to_probe, []
        for address in due:
            tasks.start_soon(self._probe, address)

    def _end_hanging_calls(self) -> None:
        now = self.clock()
        unreachable = errors.CloudUnreachable("The endpoint hangs.", phase="first_token", retry_after_s=RETRY_S)
        broken = errors.StreamBroken("The endpoint hangs.", phase="stream", retry_after_s=RETRY_S)
        for error, begun in ((unreachable, False), (broken, True)):
            for address in health.hung(self.state, now, self.settings, self._last_received_at, begun=begun):
                self.client(address).fail_calls(self.configured.model, error, begun=begun)

    async def _probe(self, address: str) -> None:
        began, upstream = self.clock(), self.client(address)
        error: errors.CausewayError | None = None
        try:
            await upstream.probe(
                self.configured.model, self.settings.probe_timeout_s, embed=self.configured.only_embeds
            )
        except errors.CausewayError as raised:
            error = raised
        finally:
            self.state = health.probe_abandoned(self.state, address)
        result = health.probe_result_of(error, upstream.last_received_at(self.configured.model) >= began)
        if result == "silent" and health.may_be_cut_off(self.state, address):
            upstream.renew()
        code = "" if error is None else error.code
        now = self.clock()
        self._set_state(
            health.probe_finished(self.state, address, result, code, now, self.settings, took_s=now - began)
        )

    def _last_received_at(self, address: str) -> float:
        return self.client(address).last_received_at(self.configured.model)

    def _apply(self, changed: health.Changed) -> None:
        state, to_probe = changed
        self._set_state(state)
        if to_probe:
            self.to_probe.extend(to_probe)
            self.wake.set()

    def _set_state(self, state: PoolState) -> None:
        """Set the state, log phase changes and count ejections."""
        before = {endpoint.address: endpoint for endpoint in self.state.endpoints}
        self.state = state
        for endpoint in state.endpoints:
            old = before.pop(endpoint.address, None)
            if old is not None and old.phase == endpoint.phase:
                continue
            if endpoint.phase == "ejected":
                self.prefixes.forget(endpoint.address)  # it may have been restarted
            if endpoint.phase == "ejected" and endpoint.last_error:
                self.ejected(self.configured.tier, endpoint.last_error)
                log.warning(
                    "Tier %s: the server at %s is ejected: %s",
                    self.configured.tier,
                    endpoint.address,
                    endpoint.last_error,
                )
            elif old is not None:
                log.info(
                    "Tier %s: the server at %s goes from %s to %s",
                    self.configured.tier,
                    endpoint.address,
                    old.phase,
                    endpoint.phase,
                )
        for address in before:
            self.prefixes.forget(address)
            log.info("Tier %s: the server at %s is removed.", self.configured.tier, address)


def _waits_no_more(endpoint: Endpoint, lease: Lease) -> Endpoint:
    return msgspec.structs.replace(
        endpoint,
        waiting_since=without(endpoint.waiting_since, lease.began_at),
        waiting_tokens=max(0, endpoint.waiting_tokens - lease.tokens),
    )


class Pools:
    """The pools: call `prepare`, then run `watch` for as long as they are used, then `close`."""

    def __init__(
        self,
        tiers: Iterable[TierEndpoints],
        clients: UpstreamClients,
        settings: LoadBalancingConfig,
        *,
        zone: str = "",
        resolve: Resolver = resolve_dns,
        ejected: Callable[[str, str], None] = lambda tier, code: None,
    ) -> None:
        self.clients = clients
        self._updated = asyncio.Event()
        self._dns_refresh_s = settings.dns_refresh_s
        self._discoveries: dict[str, EndpointDiscovery] = {}
        self.by_tier: dict[str, Pool] = {}
        for tier in tiers:
            self._discoveries[tier.tier] = EndpointDiscovery(tier.addresses, resolve)
            self.by_tier[tier.tier] = Pool(
                tier,
                _client_of(clients, tier),
                settings=settings,
                zone=zone,
                ejected=ejected,
                prefixes=PrefixIndex(settings.kv_cache_tokens),
                loads=_load_reader(tier.upstream, settings),
            )

    def configured(self, tier: str) -> tuple[EndpointAddress, ...]:
        """Return the tier's configured addresses, with names unresolved."""
        return self._discoveries[tier].configured

    async def prepare(self) -> None:
        """Resolve all DNS names before the first request; an unreachable resolver delays this by 3 s at most."""
        with anyio.move_on_after(_PREPARE_S):
            await self._refresh_all()

    async def watch(self) -> None:
        """Watch all pools and refresh DNS names, until cancelled."""
        async with anyio.create_task_group() as tasks:
            for pool in self.by_tier.values():
                tasks.start_soon(pool.watch)
            while True:
                with anyio.move_on_after(self._dns_refresh_s):
                    await self._updated.wait()
                self._updated.clear()
                await self._refresh_all()
                await self.clients.retain({one.address for pool in self.by_tier.values() for one in pool.endpoints})

    def update_endpoints(self, addresses: Mapping[str, tuple[EndpointAddress, ...]]) -> None:
        """Replace the addresses, by tier; `watch` applies them in its next iteration."""
        for tier, found in addresses.items():
            if tier in self._discoveries:
                self._discoveries[tier].replace(found)
        self._updated.set()

    async def close(self) -> None:
        await self.clients.close()

    async def _refresh_all(self) -> None:
        async with anyio.create_task_group() as tasks:
            for tier, discovery in self._discoveries.items():
                tasks.start_soon(_refresh, discovery, self.by_tier[tier])


def _client_of(clients: UpstreamClients, tier: TierEndpoints) -> Callable[[str], Upstream]:
    known = clients.known(tier.upstream)
    return lambda address: known.get(address) or clients.get(address, tier.upstream)


def _load_reader(upstream: UpstreamConfig, settings: LoadBalancingConfig) -> LoadReader | None:
    if not upstream.metrics:
        return None
    tls = client_tls(upstream_tls(upstream)) if upstream.is_http else None
    return LoadReader(upstream.metrics, tls, settings.metrics_interval_s)


async def _refresh(discovery: EndpointDiscovery, pool: Pool) -> None:
    await discovery.refresh()
    # Before the first name is resolved the pool keeps what it has.
    if zones := discovery.zones():
        pool.set_endpoints(zones)
