"""Ejection and readmission of endpoints. Pure transitions of a PoolState.

    phase              event                                          next phase
    active             failures in a row, refused, or hung            ejected, up to a share of the pool; else probed
    active             a probe fails (proof: no bound)                ejected
    active             no longer listed                               draining: running calls end, no new ones start
    ejected            its time is over                               stays ejected; a probe is sent
    ejected            the probe succeeds                             active
    ejected            the probe fails                                ejected; probed again soon
    ejected            no longer listed                               draining
    draining           listed again                                   ejected until a probe succeeds; probed at once
    draining           its last call ended                            removed

Suspicion (failures in a row, refused connections, silence until a call's deadline or of a probe) ejects only a share of
the pool, so never its only endpoint: one bad request, a long prompt, or overload may look the same on every endpoint.
Proof has no such bound: a probe with a real request that is refused or fails, or probes without a response for
`hung_after_s`. Silence counts only beyond the expected prefill of the prompts that wait at the endpoint. An endpoint
that may not be ejected on suspicion is probed at once. Only a relapse extends the ejection time; after a failed probe
the next one follows soon, because the pool may need the endpoint as soon as another one fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

import msgspec

from causeway_server.router.errors import (
    CausewayError,
    CloudFailed,
    CloudTimeout,
    CloudUnreachable,
    DeadlineExceeded,
    EngineCrashed,
    EngineOutOfMemory,
    EngineTimeout,
    EngineUnavailable,
    StreamBroken,
)

from .config import LoadBalancingConfig, ejection_s, probe_pause_s
from .endpoint_selection import (
    LATE_LIMIT,
    Endpoint,
    PoolState,
    expected_prefill_s,
    is_as_fast_as_peers,
    probe_measured,
    slow_endpoints_due,
)

FaultKind = Literal["none", "failure", "broken", "unavailable", "timeout"]
ProbeResult = Literal["healthy", "dead", "silent", "busy"]
Changed = tuple[PoolState, tuple[str, ...]]
"""Return type of transitions: the new state, and the addresses to probe with a real request now."""
_DOUBT = 0.25  # of `silent_before_probe_s`: a call abandoned after that long in silence is worth a probe
_replace = msgspec.structs.replace


def fault_kind_of(error: CausewayError) -> FaultKind:
    """Classify a call's error as a fault of its endpoint: a `timeout` only if it was silent all the while."""
    if isinstance(error, (CloudUnreachable, EngineUnavailable)):
        return "unavailable"
    if isinstance(error, (StreamBroken, EngineCrashed)):
        return "broken"
    if isinstance(error, (DeadlineExceeded, CloudTimeout, EngineTimeout)):
        return "timeout"
    if isinstance(error, (CloudFailed, EngineOutOfMemory)):
        return "failure"
    return "none"


def probe_result_of(error: CausewayError | None, received_during_probe: bool) -> ProbeResult:
    """Classify a probe. A timeout is `busy` when the endpoint sent data to any call meanwhile, else `silent`."""
    kind = "none" if error is None else fault_kind_of(error)
    if kind == "none":
        return "healthy"  # A refusal is an answer too.
    if kind == "timeout":
        return "busy" if received_during_probe else "silent"
    return "dead"


def call_failed(
    state: PoolState, address: str, error: CausewayError, now: float, settings: LoadBalancingConfig, *, silent_s: float
) -> Changed:
    """Record a failed call. `silent_s`: time since the endpoint last sent data to any call."""
    endpoint, kind = state.get(address), fault_kind_of(error)
    if endpoint is None or kind == "none":
        return state, ()
    expected_s = expected_prefill_s(state, endpoint, settings)
    if kind == "timeout" and silent_s < settings.silent_before_probe_s + expected_s:
        return call_abandoned(state, address, settings, silent_s=silent_s)
    endpoint = _replace(endpoint, failures=endpoint.failures + 1, last_error=error.code)
    state = state.replace(endpoint)
    if endpoint.phase != "active":
        return state, ()
    if kind in ("unavailable", "timeout") or endpoint.failures >= settings.consecutive_failures:
        return _suspect(state, endpoint, now, settings)
    return _probe(state, address) if kind == "broken" else (state, ())


def call_succeeded(state: PoolState, address: str) -> PoolState:
    endpoint = state.get(address)
    if endpoint is None or not (endpoint.failures or endpoint.last_error):
        return state
    return state.replace(_replace(endpoint, failures=0, last_error=""))


def call_abandoned(state: PoolState, address: str, settings: LoadBalancingConfig, *, silent_s: float) -> Changed:
    """Record that the caller left before the first token: no failure, but reason enough to probe the endpoint."""
    endpoint = state.get(address)
    if endpoint is None or endpoint.phase != "active" or silent_s < settings.silent_before_probe_s * _DOUBT:
        return state, ()
    return _probe(state, address)


def probe_finished(
    state: PoolState,
    address: str,
    result: ProbeResult,
    code: str,
    now: float,
    settings: LoadBalancingConfig,
    *,
    took_s: float = 0.0,
) -> PoolState:
    """Record the result of a probe that took `took_s`; `code` is its error's, "" for none."""
    endpoint = state.get(address)
    if endpoint is None:
        return state
    endpoint = _replace(
        endpoint,
        probing=False,
        silent_since=min(endpoint.silent_since, now - took_s) if result == "silent" else math.inf,
    )
    if endpoint.phase == "active" and result == "silent":
        return _silent(state, _replace(endpoint, last_error=code), now, settings)
    if endpoint.phase == "active" and result == "dead":
        return state.replace(_ejected(_replace(endpoint, last_error=code), now, settings))
    if endpoint.phase == "active":
        cleared = {"failures": 0, "last_error": ""} if result == "healthy" else {}
        return probe_measured(state.replace(_replace(endpoint, **cleared)), address, took_s, now, settings)
    if endpoint.phase == "ejected" and result == "healthy":
        slow_s = 0.0 if is_as_fast_as_peers(state, took_s, now) else took_s
        return state.replace(_readmitted(endpoint, now, settings, slow_s=slow_s))
    if endpoint.phase == "ejected":
        failed_probes = endpoint.failed_probes + 1
        endpoint = _replace(
            endpoint,
            last_error=code or endpoint.last_error,
            failed_probes=failed_probes,
            phase_since=now,
            not_before=now + probe_pause_s(failed_probes, settings),
        )
    return state.replace(endpoint)


def may_be_cut_off(state: PoolState, address: str) -> bool:
    """Return whether a silent probe justifies a new connection: the first one does, and any while ejected."""
    endpoint = state.get(address)
    return endpoint is not None and (endpoint.silent_since == math.inf or endpoint.phase == "ejected")


def probe_abandoned(state: PoolState, address: str) -> PoolState:
    """Record that a probe ended without a result."""
    endpoint = state.get(address)
    return state if endpoint is None else state.replace(_replace(endpoint, probing=False))


def due_probes(
    state: PoolState, now: float, settings: LoadBalancingConfig, last_received_at: Callable[[str], float]
) -> Changed:
    """Return the endpoints to probe: ejected or slow ones whose time is over, and silent ones with open calls."""
    addresses = list(slow_endpoints_due(state, now, settings))
    for endpoint in state.endpoints:
        if endpoint.phase == "ejected":
            is_due = now >= _not_before(state, endpoint, settings)
        else:
            works = (
                bool(endpoint.open_since)
                and _silence_s(endpoint, now, last_received_at) >= settings.silent_before_probe_s
            )
            is_due = works or endpoint.silent_since < math.inf
        if is_due:
            addresses.append(endpoint.address)
    return _probe(state, *addresses)


def hung(
    state: PoolState,
    now: float,
    settings: LoadBalancingConfig,
    last_received_at: Callable[[str], float],
    *,
    begun: bool = True,
) -> tuple[str, ...]:
    """Return the ejected endpoints whose calls must be ended: silent for `hung_after_s` and the expected prefill.

    `begun`: whether the calls have a first token; calls without one end sooner if other endpoints can take them.
    """
    if not begun and not state.healthy:
        return ()
    for_s = settings.hung_after_s if begun else 2.0 * settings.silent_before_probe_s
    with_calls = [endpoint for endpoint in state.endpoints if endpoint.phase == "ejected" and endpoint.open_since]
    return tuple(
        endpoint.address
        for endpoint in with_calls
        if _silence_s(endpoint, now, last_received_at) >= for_s + expected_prefill_s(state, endpoint, settings)
    )


def _silence_s(endpoint: Endpoint, now: float, last_received_at: Callable[[str], float]) -> float:
    return now - max(endpoint.open_since[0], last_received_at(endpoint.address))


def with_endpoints(state: PoolState, zones: Mapping[str, str], now: float) -> PoolState:
    """Return the pool with exactly these addresses and zones: unlisted ones drain; later ones are probed first."""
    is_first = not state.endpoints
    kept = [_kept(endpoint, zones, now) for endpoint in state.endpoints]
    known = {endpoint.address for endpoint in kept}
    new = [
        Endpoint(address=address, zone=zone)
        if is_first
        else Endpoint(address=address, zone=zone, phase="ejected", phase_since=now, not_before=now)
        for address, zone in zones.items()
        if address not in known
    ]
    return without_drained(PoolState((*kept, *new)))


def without_drained(state: PoolState) -> PoolState:
    return PoolState(
        tuple(endpoint for endpoint in state.endpoints if endpoint.phase != "draining" or endpoint.open_since)
    )


def _kept(endpoint: Endpoint, zones: Mapping[str, str], now: float) -> Endpoint:
    if endpoint.address not in zones:
        return endpoint if endpoint.phase == "draining" else _replace(endpoint, phase="draining", phase_since=now)
    endpoint = _replace(endpoint, zone=zones[endpoint.address])
    if endpoint.phase == "draining":
        return _replace(endpoint, phase="ejected", phase_since=now, not_before=now)
    return endpoint


def _suspect(state: PoolState, endpoint: Endpoint, now: float, settings: LoadBalancingConfig) -> Changed:
    if not _may_eject(state, settings):
        return _probe(state, endpoint.address)
    return state.replace(_ejected(endpoint, now, settings)), ()


def _silent(state: PoolState, endpoint: Endpoint, now: float, settings: LoadBalancingConfig) -> PoolState:
    """Classify an active endpoint whose probe got no response: it is prefilling, suspicious, or hung."""
    beyond_s = now - endpoint.silent_since - expected_prefill_s(state, endpoint, settings)
    if beyond_s >= settings.hung_after_s or (beyond_s >= 0.0 and _may_eject(state, settings)):
        endpoint = _ejected(endpoint, now, settings)
    return state.replace(endpoint)


def _may_eject(state: PoolState, settings: LoadBalancingConfig) -> bool:
    ejected = sum(other.phase == "ejected" for other in state.members)
    return ejected + 1 <= math.floor(settings.max_ejected_share * len(state.members))


def _ejected(endpoint: Endpoint, now: float, settings: LoadBalancingConfig) -> Endpoint:
    # An endpoint that was active for long enough starts again with the shortest ejection.
    is_fresh = endpoint.phase == "active" and now - endpoint.phase_since >= settings.max_ejection_s
    times = 0 if is_fresh else endpoint.ejections
    return _replace(
        endpoint,
        phase="ejected",
        phase_since=now,
        not_before=now + ejection_s(times, settings),
        ejections=times + 1,
        failed_probes=0,
        trust="trusted",
        late_count=0,
    )


def _readmitted(endpoint: Endpoint, now: float, settings: LoadBalancingConfig, *, slow_s: float) -> Endpoint:
    """Return the endpoint as readmitted. `slow_s`: duration of its probe if that was too long for requests, else 0."""
    endpoint = _replace(
        endpoint,
        phase="active",
        phase_since=now,
        failures=0,
        last_error="",
        failed_probes=0,
        ttft_s=slow_s,
        ttft_at=now,
    )
    if not slow_s:
        return endpoint
    return _replace(endpoint, trust="slow", late_count=LATE_LIMIT, not_before=now + settings.base_ejection_s)


def _not_before(state: PoolState, endpoint: Endpoint, settings: LoadBalancingConfig) -> float:
    # With less than half of the pool active there is little to protect: a recovered endpoint must be found soon.
    is_short = 2 * state.healthy < len(state.members)
    return (
        min(endpoint.not_before, endpoint.phase_since + settings.base_ejection_s) if is_short else endpoint.not_before
    )


def _probe(state: PoolState, *addresses: str) -> Changed:
    """Mark endpoints as being probed; one probe at a time for each."""
    due = [endpoint for endpoint in state.endpoints if endpoint.address in addresses and not endpoint.probing]
    for endpoint in due:
        state = state.replace(_replace(endpoint, probing=True))
    return state, tuple(endpoint.address for endpoint in due)
