"""When an endpoint gets no more requests, and when it gets them again. Pure transitions of a PoolState.

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
Proof has no such bound: a probe with a real request that is refused or fails, or probes that get nothing for
`hung_after_s`. Silence counts only beyond the expected reading of the prompts that wait at the endpoint. An endpoint
that may not be ejected on suspicion is probed at once. Only a relapse extends the time that an endpoint stays out;
after a failed probe the next one follows soon, because the pool may need the endpoint as soon as another one fails.
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
"""The new state, and the addresses to probe with a real request now."""
_DOUBT = 0.25  # of `silent_before_probe_s`: a call abandoned after that long in silence is worth a probe
_replace = msgspec.structs.replace


def fault_kind_of(error: CausewayError) -> FaultKind:
    """Classify what a call's error says about its endpoint.

    `timeout` counts against the endpoint only if it was silent all the while.
    """
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
    """Judge a probe. A timeout is `busy` when the endpoint sent something to any call meanwhile, else `silent`."""
    kind = "none" if error is None else fault_kind_of(error)
    if kind == "none":
        return "healthy"  # A refusal is an answer too.
    if kind == "timeout":
        return "busy" if received_during_probe else "silent"
    return "dead"


def call_failed(
    state: PoolState, address: str, error: CausewayError, now: float, settings: LoadBalancingConfig, *, silent_s: float
) -> Changed:
    """Record a failed call. `silent_s`: how long the endpoint had sent nothing to any call until then."""
    one, kind = state.get(address), fault_kind_of(error)
    if one is None or kind == "none":
        return state, ()
    expected_s = expected_prefill_s(state, one, settings)
    if kind == "timeout" and silent_s < settings.silent_before_probe_s + expected_s:
        return call_abandoned(state, address, settings, silent_s=silent_s)
    one = _replace(one, failures=one.failures + 1, last_error=error.code)
    state = state.replace(one)
    if one.phase != "active":
        return state, ()
    if kind in ("unavailable", "timeout") or one.failures >= settings.consecutive_failures:
        return _suspect(state, one, now, settings)
    return _probe(state, address) if kind == "broken" else (state, ())


def call_succeeded(state: PoolState, address: str) -> PoolState:
    one = state.get(address)
    if one is None or not (one.failures or one.last_error):
        return state
    return state.replace(_replace(one, failures=0, last_error=""))


def call_abandoned(state: PoolState, address: str, settings: LoadBalancingConfig, *, silent_s: float) -> Changed:
    """Record a call that ended before its first token because the caller left.

    That is no failure of the endpoint, but reason enough to probe it.
    """
    one = state.get(address)
    if one is None or one.phase != "active" or silent_s < settings.silent_before_probe_s * _DOUBT:
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
    one = state.get(address)
    if one is None:
        return state
    one = _replace(
        one, probing=False, silent_since=min(one.silent_since, now - took_s) if result == "silent" else math.inf
    )
    if one.phase == "active" and result == "silent":
        return _silent(state, _replace(one, last_error=code), now, settings)
    if one.phase == "active" and result == "dead":
        return state.replace(_ejected(_replace(one, last_error=code), now, settings))
    if one.phase == "active":
        cleared = {"failures": 0, "last_error": ""} if result == "healthy" else {}
        return probe_measured(state.replace(_replace(one, **cleared)), address, took_s, now, settings)
    if one.phase == "ejected" and result == "healthy":
        slow_s = 0.0 if is_as_fast_as_peers(state, took_s, now) else took_s
        return state.replace(_readmitted(one, now, settings, slow_s=slow_s))
    if one.phase == "ejected":
        failed_probes = one.failed_probes + 1
        one = _replace(
            one,
            last_error=code or one.last_error,
            failed_probes=failed_probes,
            phase_since=now,
            not_before=now + probe_pause_s(failed_probes, settings),
        )
    return state.replace(one)


def may_be_cut_off(state: PoolState, address: str) -> bool:
    """Whether a probe that gets nothing is reason to open a new connection: the first one, and any while ejected.

    A connection that is replaced is closed later, with the calls that still run on it.
    """
    one = state.get(address)
    return one is not None and (one.silent_since == math.inf or one.phase == "ejected")


def probe_abandoned(state: PoolState, address: str) -> PoolState:
    """Record that a probe ended without a result."""
    one = state.get(address)
    return state if one is None else state.replace(_replace(one, probing=False))


def due_probes(
    state: PoolState, now: float, settings: LoadBalancingConfig, last_received_at: Callable[[str], float]
) -> Changed:
    """Find the endpoints to probe: ejected or slow ones whose time is over, and silent ones with open calls."""
    found = list(slow_endpoints_due(state, now, settings))
    for one in state.endpoints:
        if one.phase == "ejected":
            is_due = now >= _not_before(state, one, settings)
        else:
            works = bool(one.open_since) and _silence_s(one, now, last_received_at) >= settings.silent_before_probe_s
            is_due = works or one.silent_since < math.inf
        if is_due:
            found.append(one.address)
    return _probe(state, *found)


def hung(
    state: PoolState,
    now: float,
    settings: LoadBalancingConfig,
    last_received_at: Callable[[str], float],
    *,
    begun: bool = True,
) -> tuple[str, ...]:
    """Find ejected endpoints whose calls must be ended, which would else wait until their deadlines.

    They were silent for `hung_after_s` and the expected prefill.

    Args:
        begun: False: calls without a first token, which must end sooner if other endpoints can take them at no loss.
    """
    if not begun and not state.healthy:
        return ()
    for_s = settings.hung_after_s if begun else 2.0 * settings.silent_before_probe_s
    with_calls = [one for one in state.endpoints if one.phase == "ejected" and one.open_since]
    return tuple(
        one.address
        for one in with_calls
        if _silence_s(one, now, last_received_at) >= for_s + expected_prefill_s(state, one, settings)
    )


def _silence_s(one: Endpoint, now: float, last_received_at: Callable[[str], float]) -> float:
    return now - max(one.open_since[0], last_received_at(one.address))


def with_endpoints(state: PoolState, zones: Mapping[str, str], now: float) -> PoolState:
    """Return the pool with exactly the addresses of `zones`, each with its zone.

    Endpoints that are no longer listed drain. Endpoints that are added later are probed first; those of the first call
    are active from the start.
    """
    is_first = not state.endpoints
    kept = [_kept(one, zones, now) for one in state.endpoints]
    known = {one.address for one in kept}
    new = [
        Endpoint(address=address, zone=zone)
        if is_first
        else Endpoint(address=address, zone=zone, phase="ejected", phase_since=now, not_before=now)
        for address, zone in zones.items()
        if address not in known
    ]
    return without_drained(PoolState((*kept, *new)))


def without_drained(state: PoolState) -> PoolState:
    return PoolState(tuple(one for one in state.endpoints if one.phase != "draining" or one.open_since))


def _kept(one: Endpoint, zones: Mapping[str, str], now: float) -> Endpoint:
    if one.address not in zones:
        return one if one.phase == "draining" else _replace(one, phase="draining", phase_since=now)
    one = _replace(one, zone=zones[one.address])
    if one.phase == "draining":
        return _replace(one, phase="ejected", phase_since=now, not_before=now)
    return one


def _suspect(state: PoolState, one: Endpoint, now: float, settings: LoadBalancingConfig) -> Changed:
    if not _may_eject(state, settings):
        return _probe(state, one.address)
    return state.replace(_ejected(one, now, settings)), ()


def _silent(state: PoolState, one: Endpoint, now: float, settings: LoadBalancingConfig) -> PoolState:
    """Judge an active endpoint whose probe got nothing: it reads prompts, is suspicious, or hangs."""
    beyond_s = now - one.silent_since - expected_prefill_s(state, one, settings)
    if beyond_s >= settings.hung_after_s or (beyond_s >= 0.0 and _may_eject(state, settings)):
        one = _ejected(one, now, settings)
    return state.replace(one)


def _may_eject(state: PoolState, settings: LoadBalancingConfig) -> bool:
    ejected = sum(other.phase == "ejected" for other in state.members)
    return ejected + 1 <= math.floor(settings.max_ejected_share * len(state.members))


def _ejected(one: Endpoint, now: float, settings: LoadBalancingConfig) -> Endpoint:
    # An endpoint that was active for long enough starts again with the shortest ejection.
    is_fresh = one.phase == "active" and now - one.phase_since >= settings.max_ejection_s
    times = 0 if is_fresh else one.ejections
    return _replace(
        one,
        phase="ejected",
        phase_since=now,
        not_before=now + ejection_s(times, settings),
        ejections=times + 1,
        failed_probes=0,
        trust="trusted",
        late_count=0,
    )


def _readmitted(one: Endpoint, now: float, settings: LoadBalancingConfig, *, slow_s: float) -> Endpoint:
    """`slow_s`: the duration of its probe where that was too long to give it requests, else 0."""
    one = _replace(
        one, phase="active", phase_since=now, failures=0, last_error="", failed_probes=0, ttft_s=slow_s, ttft_at=now
    )
    if not slow_s:
        return one
    return _replace(one, trust="slow", late_count=LATE_LIMIT, not_before=now + settings.base_ejection_s)


def _not_before(state: PoolState, one: Endpoint, settings: LoadBalancingConfig) -> float:
    # With less than half of the pool active there is little to protect: a recovered endpoint must be found soon.
    is_short = 2 * state.healthy < len(state.members)
    return min(one.not_before, one.phase_since + settings.base_ejection_s) if is_short else one.not_before


def _probe(state: PoolState, *addresses: str) -> Changed:
    """Mark endpoints as being probed; one probe at a time for each."""
    due = [one for one in state.endpoints if one.address in addresses and not one.probing]
    for one in due:
        state = state.replace(_replace(one, probing=True))
    return state, tuple(one.address for one in due)
