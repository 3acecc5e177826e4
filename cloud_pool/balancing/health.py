"""When an endpoint gets no more requests, and when it does again. Pure transitions of a PoolState.

Suspicion (faults in a row, refused connections, silence until a call's deadline) ejects only a share of the pool:
one bad request, or too much load, may look alike everywhere. Proof, a real request to the endpoint that failed, has
no such bound. Whoever may not be ejected on suspicion is asked at once. Only a relapse keeps one out for longer: who is
asked in vain is asked again soon, for with the next one that falls its strength may be all there is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

import msgspec

from router.errors import (
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

from . import slowness
from .config import LoadBalancingConfig, pause_s, relapse_s
from .state import Endpoint, PoolState, state_of

FaultKind = Literal["none", "fault", "broken", "gone", "late"]
ProbeResult = Literal["well", "dead", "busy"]
Changed = tuple[PoolState, tuple[str, ...]]
"""The new state, and the addresses that are to be asked by a real request, now."""
_DOUBT = 0.25  # of `silent_before_probe_s`, then a call that ended without a word is worth a question
_replace = msgspec.structs.replace


def fault_kind_of(error: CausewayError) -> FaultKind:
    """What an error of a call says about the endpoint. `late` is its fault only if it was silent all the while."""
    if isinstance(error, (CloudUnreachable, EngineUnavailable)):
        return "gone"
    if isinstance(error, (StreamBroken, EngineCrashed)):
        return "broken"
    if isinstance(error, (DeadlineExceeded, CloudTimeout, EngineTimeout)):
        return "late"
    if isinstance(error, (CloudFailed, EngineOutOfMemory)):
        return "fault"
    return "none"


def probe_result_of(error: CausewayError | None, heard: bool) -> ProbeResult:
    """Of a probe. `heard`: the endpoint sent something to somebody while the probe waited."""
    blame = "none" if error is None else fault_kind_of(error)
    if blame == "none":
        return "well"  # A refusal is an answer too.
    return "busy" if blame == "late" and heard else "dead"


def failed(
    state: PoolState, address: str, error: CausewayError, now: float, settings: LoadBalancingConfig, *, silent_s: float
) -> Changed:
    """A call on `address` failed. `silent_s`: how long nothing at all came from the endpoint until then."""
    one, blame = state.get(address), fault_kind_of(error)
    if one is None or blame == "none":
        return state, ()
    if blame == "late" and silent_s < settings.silent_before_probe_s:
        return left_waiting(state, address, settings, silent_s=silent_s)
    one = _replace(one, faults=one.faults + 1, fault=error.code)
    state = state.put(one)
    if one.phase != "in":
        return state, ()
    if blame in ("gone", "late") or one.faults >= settings.consecutive_failures:
        return _suspected(state, one, now, settings)
    return _ask(state, address) if blame == "broken" else (state, ())


def succeeded(state: PoolState, address: str) -> PoolState:
    one = state.get(address)
    if one is None or not (one.faults or one.fault):
        return state
    return state.put(_replace(one, faults=0, fault=""))


def left_waiting(state: PoolState, address: str, settings: LoadBalancingConfig, *, silent_s: float) -> Changed:
    """A caller left, or another endpoint was quicker, before anything came: no fault, but reason enough to ask."""
    one = state.get(address)
    if one is None or one.phase != "in" or silent_s < settings.silent_before_probe_s * _DOUBT:
        return state, ()
    return _ask(state, address)


def probed(
    state: PoolState,
    address: str,
    probe_result: ProbeResult,
    code: str,
    now: float,
    settings: LoadBalancingConfig,
    *,
    took_s: float = 0.0,
) -> PoolState:
    """`address` was asked by a real request, which took so long."""
    one = state.get(address)
    if one is None:
        return state
    one = _replace(one, asked=False)
    if one.phase == "in" and probe_result == "dead":
        return state.put(_ejected(_replace(one, fault=code), now, settings))
    if one.phase == "in":
        well = {"faults": 0, "fault": ""} if probe_result == "well" else {}
        return slowness.probed(state.put(_replace(one, **well)), address, took_s, now, settings)
    if one.phase == "ejected" and probe_result == "well":
        return state.put(_back(one, now, settings, slow_s=0.0 if slowness.as_peers(state, took_s, now) else took_s))
    if one.phase == "ejected":
        silences, fault = one.silences + 1, code or one.fault
        one = _replace(one, fault=fault, silences=silences, since=now, until=now + pause_s(silences, settings))
    return state.put(one)


def probe_abandoned(state: PoolState, address: str) -> PoolState:
    """A probe ended without an answer to its question."""
    one = state.get(address)
    return state if one is None else state.put(_replace(one, asked=False))


def due_probes(
    state: PoolState, now: float, settings: LoadBalancingConfig, last_received_at: Callable[[str], float]
) -> Changed:
    """Who is to be asked: the ejected and the slow whose time is over, and the silent that have work."""
    found = list(slowness.slow_ones(state, now, settings))
    for one in state.endpoints:
        if one.phase == "ejected":
            is_due = now >= _until(state, one, settings)
        else:
            is_due = (
                bool(one.open)
                and now - max(one.open[0], last_received_at(one.address)) >= settings.silent_before_probe_s
            )
        if is_due:
            found.append(one.address)
    return _ask(state, *found)


def hung(
    state: PoolState, now: float, settings: LoadBalancingConfig, last_received_at: Callable[[str], float]
) -> tuple[str, ...]:
    """Whose calls are all to be ended: ejected, and silent for `hung_after_s`. They would wait until their deadline."""
    return _silent(state, settings.hung_after_s, now, last_received_at)


def stranded(
    state: PoolState, now: float, settings: LoadBalancingConfig, last_received_at: Callable[[str], float]
) -> tuple[str, ...]:
    """Whose calls that did not begin are to be ended: they lose nothing, and others can take them."""
    return _silent(state, 2.0 * settings.silent_before_probe_s, now, last_received_at) if state.healthy else ()


def _silent(state: PoolState, for_s: float, now: float, last_received_at: Callable[[str], float]) -> tuple[str, ...]:
    return tuple(
        one.address
        for one in state.endpoints
        if one.phase == "ejected" and one.open and now - max(one.open[0], last_received_at(one.address)) >= for_s
    )


def renamed(state: PoolState, zones: Mapping[str, str], now: float) -> PoolState:
    """The pool that has the addresses of `zones`, each with its zone. Who leaves, drains; who comes later is asked
    first, who is there from the start need not be."""
    first = not state.endpoints
    kept = [_kept(one, zones, now) for one in state.endpoints]
    known = {one.address for one in kept}
    new = [
        Endpoint(address=address, zone=zone)
        if first
        else Endpoint(address=address, zone=zone, phase="ejected", since=now, until=now)
        for address, zone in zones.items()
        if address not in known
    ]
    return settled(state_of([*kept, *new]))


def settled(state: PoolState) -> PoolState:
    """Without those that have drained."""
    if all(one.phase != "draining" or one.open for one in state.endpoints):
        return state
    return state_of(one for one in state.endpoints if one.phase != "draining" or one.open)


def _kept(one: Endpoint, zones: Mapping[str, str], now: float) -> Endpoint:
    if one.address not in zones:
        return one if one.phase == "draining" else _replace(one, phase="draining", since=now)
    one = _replace(one, zone=zones[one.address])
    if one.phase == "draining":
        return _replace(one, phase="ejected", since=now, until=now)
    return one


def _suspected(state: PoolState, one: Endpoint, now: float, settings: LoadBalancingConfig) -> Changed:
    away = sum(other.phase == "ejected" for other in state.members)
    if away + 1 > math.floor(settings.max_ejected_share * len(state.members)):
        return _ask(state, one.address)
    return state.put(_ejected(one, now, settings)), ()


def _ejected(one: Endpoint, now: float, settings: LoadBalancingConfig) -> Endpoint:
    # One that did well for long begins anew.
    fresh = one.phase == "in" and now - one.since >= settings.max_ejection_s
    times = 0 if fresh else one.ejections
    until = now + relapse_s(times, settings)
    return _replace(
        one, phase="ejected", since=now, until=until, ejections=times + 1, silences=0, trust="whole", lates=0
    )


def _back(one: Endpoint, now: float, settings: LoadBalancingConfig, *, slow_s: float) -> Endpoint:
    """`slow_s`: what its answer took, where that was too long to give it anybody's request; 0: it was not."""
    one = _replace(one, phase="in", since=now, faults=0, fault="", silences=0, ttft_s=slow_s, ttft_at=now)
    return _replace(one, trust="slow", lates=slowness.LATES, until=now + settings.base_ejection_s) if slow_s else one


def _until(state: PoolState, one: Endpoint, settings: LoadBalancingConfig) -> float:
    # With less than half of the pool left there is little to protect: who is back must be found soon.
    is_short = 2 * state.healthy < len(state.members)
    return min(one.until, one.since + settings.base_ejection_s) if is_short else one.until


def _ask(state: PoolState, *addresses: str) -> Changed:
    """Nobody is asked twice at a time."""
    asking = [one for one in state.endpoints if one.address in addresses and not one.asked]
    for one in asking:
        state = state.put(_replace(one, asked=True))
    return state, tuple(one.address for one in asking)
