"""Which endpoints are slower than their peers, by times to first token (TTFT). Pure.

usual      the median of the endpoints' moving means
late       a TTFT that no usual answer needs: the usual one and four mean deviations more, as in TCP's retransmission
           timeout (RFC 6298). Where all prompts are alike that is soon, where they differ it is not.
slowness   the moving mean over 1.5 times the usual TTFT, at least 1. A call that has waited until it is late is
           expected to wait as long again (Lindy's law), so the endpoint counts as slow from then on, before anything
           was measured; so does one where such a call was abandoned. A measurement that is not renewed fades.

Beyond that an endpoint has a trust level, which does not fade:

    trust      event                                     next trust
    trusted    LATE_LIMIT late first tokens in a row     slow       probed; requests only if all others are busy
    slow       a probe as fast as its peers              on_trial   the next request goes there, and no other
    on_trial   that request is in time                   trusted
    on_trial   that request is late                      slow       it is fast for probes only; twice as long as before
"""

from __future__ import annotations

import math

import msgspec

from .config import LoadBalancingConfig, ejection_s, probe_pause_s
from .state import Endpoint, PoolState

SLOW = 2.0  # slowness from which on an endpoint is left alone while others have room
LATE_LIMIT = 3  # late first tokens in a row
_USUAL = 1.5  # times the median: TTFTs vary by as much with the prompts alone
_MAX_SLOWNESS = 7.0
_MIN_MEDIAN_S = 0.005  # medians below it say nothing about slowness
_UP, _DOWN = 0.5, 0.3  # weights of a new sample: two slow answers are enough, recovery takes a few more
_DEVIATION_WEIGHT = 0.25  # the same for the mean deviation
_DEVIATIONS = 4.0
_MIN_LATE = 1.5  # times the usual TTFT
_MIN_PREFILL_TOKENS = 64
_PREFILL_MARGIN = 2.0  # times the measured time
_AS_PEERS = 2.0  # times the usual TTFT: a probe must be faster
_replace = msgspec.structs.replace


def median_ttft_s(state: PoolState, now: float) -> float:
    """Return the lower median of the active endpoints' TTFTs; 0 while nothing was measured."""
    seen = sorted(_ttft_s(one, now) for one in state.endpoints if one.phase == "active" and one.ttft_s > 0.0)
    return max(_MIN_MEDIAN_S, seen[(len(seen) - 1) // 2]) if seen else 0.0


def late_after_s(state: PoolState, now: float) -> float:
    """Return the TTFT from which on a first token is late; infinity while nothing was measured."""
    median_s = median_ttft_s(state, now)
    if median_s <= 0.0:
        return math.inf
    spreads = sorted(one.spread_s for one in state.endpoints if one.phase == "active" and one.ttft_s > 0.0)
    return max(_MIN_LATE * median_s, median_s + _DEVIATIONS * spreads[(len(spreads) - 1) // 2])


def slowness(endpoint: Endpoint, median_s: float, late_s: float, now: float, settings: LoadBalancingConfig) -> float:
    """Return the endpoint's slowness, 1 to 7; from SLOW on it is left alone while others have room."""
    if median_s <= 0.0:
        return 1.0
    measured_s = endpoint.ttft_s
    if measured_s > median_s and not (endpoint.waiting_since or endpoint.slow):
        decay = math.exp((endpoint.ttft_at - now) / settings.slowness_decay_s)
        measured_s = median_s + (measured_s - median_s) * decay
    waited_s = _waited_s(endpoint, now)
    times = max(
        1.0,
        measured_s / (_USUAL * median_s),
        SLOW * waited_s / late_s if waited_s >= late_s else 0.0,
        SLOW if endpoint.slow else 0.0,
    )
    return min(times, _MAX_SLOWNESS)


def prefill_measured(state: PoolState, address: str, tokens: int, seconds: float) -> PoolState:
    """Record the time to first token of a prompt of so many tokens. Short prompts say nothing about reading."""
    one = state.get(address)
    if one is None or tokens < _MIN_PREFILL_TOKENS:
        return state
    sample_s = seconds / tokens
    weight = (_UP if sample_s > one.prefill_s else _DOWN) if one.prefill_s else 1.0
    return state.replace(_replace(one, prefill_s=one.prefill_s + weight * (sample_s - one.prefill_s)))


def expected_prefill_s(state: PoolState, one: Endpoint, settings: LoadBalancingConfig) -> float:
    """Return how long an endpoint may be silent because it reads the prompts that wait there for a first token.

    What is not measured counts as nothing where others can take the requests. The last active endpoint has the benefit
    of the doubt: cached beginnings of prompts make the measured speed look higher than that of a new prompt.
    """
    token_s = _PREFILL_MARGIN * one.prefill_s
    if not any(other.phase == "active" and other.address != one.address for other in state.endpoints):
        token_s = max(token_s, 1.0 / settings.prefill_tokens_per_s)
    return one.waiting_tokens * token_s


def is_slow(state: PoolState, endpoint: Endpoint, now: float, settings: LoadBalancingConfig) -> bool:
    return slowness(endpoint, median_ttft_s(state, now), late_after_s(state, now), now, settings) >= SLOW


def first_token_measured(
    state: PoolState, address: str, seconds: float, now: float, settings: LoadBalancingConfig
) -> PoolState:
    """Record one more time to first token."""
    one = state.get(address)
    if one is None:
        return state
    if seconds >= late_after_s(state, now):
        return _with_late(state, _with_sample(one, seconds, now), one.late_count + 1, now, settings)
    if one.trust == "on_trial":
        return state.replace(_trusted_again(one, median_ttft_s(state, now), now))
    one = _with_sample(one, seconds, now)
    return state.replace(one if one.slow else _replace(one, late_count=0))


def wait_abandoned(
    state: PoolState, address: str, waited_s: float, now: float, settings: LoadBalancingConfig
) -> PoolState:
    """Record a call that ended after `waited_s` without a first token, which says nothing before it was late."""
    one = state.get(address)
    if one is None or waited_s < late_after_s(state, now):
        return state
    sampled = _with_sample(one, max(one.ttft_s, 2.0 * waited_s), now)
    return _with_late(state, sampled, one.late_count + 1, now, settings)


def due_probes(state: PoolState, now: float, settings: LoadBalancingConfig) -> tuple[str, ...]:
    """Find the endpoints to probe: slow ones whose pause is over, and those one late answer away from slow."""
    untried = [one for one in state.endpoints if one.phase == "active" and one.trust != "on_trial"]
    doubtful = [one for one in untried if (one.slow or one.late_count >= LATE_LIMIT - 1) and now >= one.not_before]
    return tuple(one.address for one in doubtful if is_slow(state, one, now, settings))


def probe_measured(
    state: PoolState, address: str, seconds: float, now: float, settings: LoadBalancingConfig
) -> PoolState:
    """Record that an active endpoint answered a probe after `seconds`; it changes only slow or doubtful ones."""
    one = state.get(address)
    median_s = median_ttft_s(state, now)
    if one is None or not median_s or one.trust == "on_trial" or not is_slow(state, one, now, settings):
        return state
    if not is_as_fast_as_peers(state, seconds, now):
        not_before = max(one.not_before, now + probe_pause_s(one.late_count + 1 - LATE_LIMIT, settings))
        sampled = _with_sample(_replace(one, not_before=not_before), seconds, now)
        return _with_late(state, sampled, one.late_count + 1, now, settings)
    if now < one.not_before:
        return state  # It was probed for another reason, and is to stay out for longer.
    if not one.slow:
        return state.replace(_replace(_with_sample(one, seconds, now), not_before=now + settings.base_ejection_s))
    return state.replace(_replace(one, trust="on_trial", not_before=now))


def is_as_fast_as_peers(state: PoolState, seconds: float, now: float) -> bool:
    """Tell whether a probe of this duration was as fast as the other endpoints' answers are."""
    median_s = median_ttft_s(state, now)
    return not median_s or seconds < _AS_PEERS * median_s


def _with_sample(one: Endpoint, seconds: float, now: float) -> Endpoint:
    if one.ttft_s <= 0.0:
        return _replace(one, ttft_s=seconds, spread_s=seconds / 2.0, ttft_at=now)
    off_s = seconds - one.ttft_s
    return _replace(
        one,
        ttft_s=one.ttft_s + (_UP if off_s > 0.0 else _DOWN) * off_s,
        spread_s=one.spread_s + _DEVIATION_WEIGHT * (abs(off_s) - one.spread_s),
        ttft_at=now,
    )


def _with_late(
    state: PoolState, one: Endpoint, late_count: int, now: float, settings: LoadBalancingConfig
) -> PoolState:
    is_new = one.trust == "trusted" and one.phase == "active" and late_count >= LATE_LIMIT
    one = _replace(one, late_count=late_count)
    if one.trust == "on_trial" or (is_new and one.ttft_s >= SLOW * _USUAL * median_ttft_s(state, now)):
        times = 0 if now - one.not_before >= settings.max_ejection_s else one.ejections
        not_before = now + ejection_s(times - 1, settings) if times else now
        one = _replace(one, trust="slow", ejections=times + 1, not_before=max(one.not_before, not_before))
    return state.replace(one)


def _trusted_again(one: Endpoint, usual_s: float, now: float) -> Endpoint:
    return _replace(one, trust="trusted", late_count=0, ttft_s=usual_s, ttft_at=now)


def _ttft_s(endpoint: Endpoint, now: float) -> float:
    return max(endpoint.ttft_s, _waited_s(endpoint, now))


def _waited_s(endpoint: Endpoint, now: float) -> float:
    return now - endpoint.waiting_since[0] if endpoint.waiting_since else 0.0
