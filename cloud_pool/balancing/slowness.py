"""Which endpoints are slower than their peers, by times to first token (TTFT). Pure.

usual      the median of the endpoints' moving means
late       no usual first token takes so long: the usual, and four mean deviations more, as TCP's timeout for an
           acknowledgement (RFC 6298). Where all prompts are alike that is soon, where they differ it is not
slowness   the moving mean over 1.5 times the usual, at least 1. Who has waited until late is expected to wait as long
           again (Lindy's law), so an endpoint counts as slow from then on, before anything was measured; and so does
           one where a call was given up. A figure that is not renewed fades

Beyond that an endpoint has its trust, which does not fade:

    trust      event                                        then
    whole      LATES late ones in a row                     slow        asked by probes; by requests if all are busy
    slow       a probe as quick as its peers                tried       the next request goes there, and no other
    tried      that one is in time                          whole       with a share that grows from little
    tried      … or late: it is quick for probes only       slow        for twice as long as the last time
"""

from __future__ import annotations

import math

import msgspec

from .config import LoadBalancingConfig, pause_s, relapse_s
from .state import Endpoint, PoolState

SLOW = 2.0  # times 1.5 times the usual
LATES = 3
_USUAL = 1.5  # times the median: times to the first token vary by as much with the prompts alone
_SLOWEST = 7.0
_LEAST_S = 0.005  # medians below it say nothing about slowness
_UP, _DOWN = 0.5, 0.3  # weights of a new figure: two slow answers are enough, forgiving takes a few more
_DEVIATION = 0.25  # the same, of the mean deviation
_DEVIATIONS = 4.0
_LATE = 1.5  # times the usual, at least
_AS_PEERS = 2.0  # times the usual: so quick must a probe be
_replace = msgspec.structs.replace


def median_ttft_s(state: PoolState, now: float) -> float:
    """The usual: the lower median of the endpoints that take requests; 0 while nothing was measured."""
    seen = sorted(_raw_s(one, now) for one in state.endpoints if one.phase == "in" and one.ttft_s > 0.0)
    return max(_LEAST_S, seen[(len(seen) - 1) // 2]) if seen else 0.0


def late_s(state: PoolState, now: float) -> float:
    """From when on a first token is late; infinity while nothing was measured."""
    median_s = median_ttft_s(state, now)
    if median_s <= 0.0:
        return math.inf
    spreads = sorted(one.spread_s for one in state.endpoints if one.phase == "in" and one.ttft_s > 0.0)
    return max(_LATE * median_s, median_s + _DEVIATIONS * spreads[(len(spreads) - 1) // 2])


def slowness(endpoint: Endpoint, median_s: float, late: float, now: float, settings: LoadBalancingConfig) -> float:
    """From 1 to 7; SLOW and more is left alone while others have room."""
    if median_s <= 0.0:
        return 1.0
    measured = endpoint.ttft_s
    if measured > median_s and not (endpoint.waiting or endpoint.slow):
        measured = median_s + (measured - median_s) * math.exp((endpoint.ttft_at - now) / settings.slowness_decay_s)
    waited = _waited_s(endpoint, now)
    times = max(
        1.0,
        measured / (_USUAL * median_s),
        SLOW * waited / late if waited >= late else 0.0,
        SLOW if endpoint.slow else 0.0,
    )
    return min(times, _SLOWEST)


def is_slow(state: PoolState, endpoint: Endpoint, now: float, settings: LoadBalancingConfig) -> bool:
    return slowness(endpoint, median_ttft_s(state, now), late_s(state, now), now, settings) >= SLOW


def measured(state: PoolState, address: str, seconds: float, now: float, settings: LoadBalancingConfig) -> PoolState:
    """With one more time to the first token."""
    one = state.get(address)
    if one is None:
        return state
    if seconds >= late_s(state, now):
        return _marked(state, _with(one, seconds, now), one.lates + 1, now, settings)
    if one.trust == "tried":
        return state.put(_regained(one, median_ttft_s(state, now), now))
    one = _with(one, seconds, now)
    return state.put(one if one.slow else _replace(one, lates=0))


def given_up(state: PoolState, address: str, waited: float, now: float, settings: LoadBalancingConfig) -> PoolState:
    """A call ended after `waited` seconds without a first token. Before it was late that says nothing."""
    one = state.get(address)
    if one is None or waited < late_s(state, now):
        return state
    return _marked(state, _with(one, max(one.ttft_s, 2.0 * waited), now), one.lates + 1, now, settings)


def slow_ones(state: PoolState, now: float, settings: LoadBalancingConfig) -> tuple[str, ...]:
    """Who is to be asked how it is: the slow whose pause is over, and who is one late answer away from it."""
    there = [one for one in state.endpoints if one.phase == "in" and one.trust != "tried"]
    doubtful = [one for one in there if (one.slow or one.lates >= LATES - 1) and now >= one.until]
    return tuple(one.address for one in doubtful if is_slow(state, one, now, settings))


def probed(state: PoolState, address: str, seconds: float, now: float, settings: LoadBalancingConfig) -> PoolState:
    """A slow one, or one that seems so, answered a probe after `seconds`."""
    one = state.get(address)
    median_s = median_ttft_s(state, now)
    if one is None or not median_s or one.trust == "tried" or not is_slow(state, one, now, settings):
        return state
    if not as_peers(state, seconds, now):
        until = max(one.until, now + pause_s(one.lates + 1 - LATES, settings))
        return _marked(state, _with(_replace(one, until=until), seconds, now), one.lates + 1, now, settings)
    if now < one.until:
        return state  # It was asked for another reason, and is to stay out for longer.
    if not one.slow:
        return state.put(_replace(_with(one, seconds, now), until=now + settings.base_ejection_s))
    return state.put(_replace(one, trust="tried", until=now))


def as_peers(state: PoolState, seconds: float, now: float) -> bool:
    """Whether a probe that took so long was as quick as the others' answers are."""
    median_s = median_ttft_s(state, now)
    return not median_s or seconds < _AS_PEERS * median_s


def _with(one: Endpoint, seconds: float, now: float) -> Endpoint:
    if one.ttft_s <= 0.0:
        return _replace(one, ttft_s=seconds, spread_s=seconds / 2.0, ttft_at=now)
    off = seconds - one.ttft_s
    return _replace(
        one,
        ttft_s=one.ttft_s + (_UP if off > 0.0 else _DOWN) * off,
        spread_s=one.spread_s + _DEVIATION * (abs(off) - one.spread_s),
        ttft_at=now,
    )


def _marked(state: PoolState, one: Endpoint, lates: int, now: float, settings: LoadBalancingConfig) -> PoolState:
    """With so many late ones in a row."""
    is_new = one.trust == "whole" and one.phase == "in" and lates >= LATES
    one = _replace(one, lates=lates)
    if one.trust == "tried" or (is_new and one.ttft_s >= SLOW * _USUAL * median_ttft_s(state, now)):
        times = 0 if now - one.until >= settings.max_ejection_s else one.ejections
        until = now + relapse_s(times - 1, settings) if times else now
        one = _replace(one, trust="slow", ejections=times + 1, until=max(one.until, until))
    return state.put(one)


def _regained(one: Endpoint, usual_s: float, now: float) -> Endpoint:
    # Whom one quick probe spoke for gets its share at once; who was slow for a while, step by step.
    since = now if one.lates > LATES else one.since
    return _replace(one, trust="whole", lates=0, ttft_s=usual_s, ttft_at=now, since=since)


def _raw_s(endpoint: Endpoint, now: float) -> float:
    return max(endpoint.ttft_s, _waited_s(endpoint, now))


def _waited_s(endpoint: Endpoint, now: float) -> float:
    return now - endpoint.waiting[0] if endpoint.waiting else 0.0
