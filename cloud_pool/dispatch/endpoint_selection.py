"""State of one tier's endpoints, their slowness, and the selection of one for the next request. Pure.

The state is frozen; time (monotonic seconds) and randomness are arguments. `choose` selects:

(1) Candidates are active endpoints that are not excluded; without any, the result is None.
(2) Endpoints in the gateway's own zone, as long as one of them has room; else all.
(3) A slow endpoint on trial gets one request at a time. Retries skip this step: they have no time for it.
(4) Slow endpoints are left out, unless every other endpoint has more load.
(5) With the blocks of a prompt: the endpoint at which they cost least.
(6) Else the less loaded of two random endpoints (Mitzenmacher, "The Power of Two Choices", 2001).

Load counts in requests of a typical endpoint of the pool:

    load = (outstanding + others + 1) × slowness² / (1 − KV use)

`others` are requests of other clients and gateways, where the server reports how many it has; what its requests need of
the KV cache is its own report, too. Where others sent long prompts to one of four servers, the p99 of the time to first
token was 3.3 s with these reports and 48 s without (`python -m tests.bench prefix`). A server that reports nothing has
others = 0 and KV use = 0.
`slowness` is squared, because sharing work by speed alone would still give some callers a first token that takes ten
times as long. An endpoint that is new or returns gets its share at once: if it is cold, its slowness shows it. Slowness
derives from times to first token (TTFT):

usual      the median of the endpoints' moving means
late       a TTFT that no usual answer needs: the usual one and four mean deviations more, as in TCP's retransmission
           timeout (RFC 6298). Where all prompts are alike that is soon, where they differ it is not.
slowness   the moving mean over 1.5 times the usual TTFT, at least 1. A call that has waited until it is late is
           expected to wait as long again (Lindy's law), so the endpoint counts as slow from then on, before anything
           was measured; so does one where such a call was abandoned. A measurement that is not renewed fades.

In addition an endpoint has a trust level, which does not fade:

    trust      event                                     next trust
    trusted    LATE_LIMIT late first tokens in a row     slow       probed; requests only if all others are busy
    slow       a probe as fast as its peers              on_trial   the next request goes there, and no other
    on_trial   that request is in time                   trusted
    on_trial   that request is late                      slow       it is fast for probes only; twice as long as before

A prompt goes where most of it is in the KV cache, unless the way there is longer. In tokens to be prefilled:

    cost = tokens of the prompt that are not cached + load_tokens × load

A conversation has a home: the endpoint for which the hash of key and address is the lowest (Thaler and Ravishankar,
"Using name-based mappings to increase hit rates", 1998). Every gateway finds the same one, and an absent endpoint moves
its own conversations only. _HOME_SHARE of a prompt counts as cached there, because another gateway may have sent it:
with two gateways that take turns, the upstreams then find 93 % of the tokens in their caches, without it 87 %.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

import msgspec

from causeway_server.router.types import Request

from ..upstreams.server_load import ServerLoad
from .config import LoadBalancingConfig, ejection_s, probe_pause_s

Phase = Literal["active", "ejected", "draining"]
Trust = Literal["trusted", "slow", "on_trial"]
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
_HEAD_CHARACTERS = 1024
_HOME_SHARE = 0.7
_MIN_KV_FREE = 0.05


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    address: str
    zone: str = ""
    phase: Phase = "active"
    phase_since: float = -math.inf
    open_since: tuple[float, ...] = ()  # start of each open lease, the oldest first
    waiting_since: tuple[float, ...] = ()  # of those, the ones without a first token
    waiting_tokens: int = 0  # of their prompts, estimated
    prefill_s: float = 0.0  # moving mean of the time to first token, by token of the prompt; 0: not measured
    ttft_s: float = 0.0  # moving mean of the time to first token; 0: not measured
    ttft_at: float = 0.0
    spread_s: float = 0.0  # moving mean deviation of single times from ttft_s
    late_count: int = 0  # late first tokens in a row
    trust: Trust = "trusted"  # trusted to be as fast as its peers
    failures: int = 0  # in a row
    last_error: str = ""  # error code, "" after a success
    ejections: int = 0  # in a row
    failed_probes: int = 0  # in a row
    not_before: float = 0.0  # while ejected or slow: no probe before this time
    probing: bool = False  # a probe is in progress
    silent_since: float = math.inf  # when the first of the last probes in a row began to which nothing came
    reported: ServerLoad | None = None  # what the server itself reports of its load; None: nothing, or not any more
    others: int = 0  # requests there that are not this process's

    @property
    def outstanding(self) -> int:
        return len(self.open_since)

    @property
    def slow(self) -> bool:
        """Whether it is known to be several times slower than its peers: it gets probes, then one trial request."""
        return self.trust != "trusted"


class Prompt(msgspec.Struct, frozen=True):
    """The facts of a request's prompt that the selection uses."""

    tokens: int = 0  # estimated
    key: bytes = b""  # of its conversation (`prefix_key`)
    blocks: tuple[int, ...] = ()  # `prefix_index.prompt_blocks`; none: prefixes do not count


NO_PROMPT = Prompt()


class PoolState(msgspec.Struct, frozen=True):
    endpoints: tuple[Endpoint, ...] = ()

    def get(self, address: str) -> Endpoint | None:
        for endpoint in self.endpoints:
            if endpoint.address == address:
                return endpoint
        return None

    def replace(self, changed: Endpoint) -> PoolState:
        """Return the state with `changed` in place of the endpoint of that address, if it is still there."""
        address = changed.address
        return PoolState(tuple([changed if each.address == address else each for each in self.endpoints]))

    @property
    def members(self) -> tuple[Endpoint, ...]:
        """Listed endpoints, without those that drain."""
        return tuple(endpoint for endpoint in self.endpoints if endpoint.phase != "draining")

    @property
    def healthy(self) -> int:
        return sum(endpoint.phase == "active" for endpoint in self.endpoints)


def without(times: tuple[float, ...], time: float) -> tuple[float, ...]:
    """Return `times` less one item that equals `time`."""
    if time not in times:
        return times
    at = times.index(time)
    return times[:at] + times[at + 1 :]


class PoolCapacity(msgspec.Struct, frozen=True):
    """A tier's capacity. `endpoints`: active ones that are not slow, at least 1.

    `away`: open calls of this process at the others, which hold no permit that another endpoint could use.
    """

    endpoints: int
    away: int = 0


def capacity_of(state: PoolState) -> PoolCapacity:
    """Return the capacity, without endpoints that of one: requests fail instead of waiting for a dead tier."""
    others = [endpoint for endpoint in state.endpoints if endpoint.phase != "active" or endpoint.slow]
    serving = len(state.endpoints) - len(others)
    return PoolCapacity(serving, sum(endpoint.outstanding for endpoint in others)) if serving else PoolCapacity(1)


def median_ttft_s(state: PoolState, now: float) -> float:
    """Return the lower median of the active endpoints' TTFTs; 0 without a measurement."""
    seen = sorted(
        [_ttft_s(endpoint, now) for endpoint in state.endpoints if endpoint.phase == "active" and endpoint.ttft_s > 0.0]
    )
    return max(_MIN_MEDIAN_S, seen[(len(seen) - 1) // 2]) if seen else 0.0


def late_after_s(state: PoolState, now: float) -> float:
    """Return the TTFT from which on a first token is late; infinity without a measurement."""
    median_s = median_ttft_s(state, now)
    if median_s <= 0.0:
        return math.inf
    spreads = sorted(
        [endpoint.spread_s for endpoint in state.endpoints if endpoint.phase == "active" and endpoint.ttft_s > 0.0]
    )
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
    """Record the time to first token of a prompt of `tokens` tokens. Short prompts do not show the prefill speed."""
    endpoint = state.get(address)
    if endpoint is None or tokens < _MIN_PREFILL_TOKENS:
        return state
    sample_s = seconds / tokens
    weight = (_UP if sample_s > endpoint.prefill_s else _DOWN) if endpoint.prefill_s else 1.0
    return state.replace(_replace(endpoint, prefill_s=endpoint.prefill_s + weight * (sample_s - endpoint.prefill_s)))


def expected_prefill_s(state: PoolState, endpoint: Endpoint, settings: LoadBalancingConfig) -> float:
    """Return how long an endpoint may be silent because it prefills the prompts waiting there.

    Unmeasured speed counts as nothing if others can take the requests. The last active endpoint has the benefit of the
    doubt: cached prefixes make the measured speed look higher than that of a new prompt.
    """
    token_s = _PREFILL_MARGIN * endpoint.prefill_s
    if not any(other.phase == "active" and other.address != endpoint.address for other in state.endpoints):
        token_s = max(token_s, 1.0 / settings.prefill_tokens_per_s)
    return endpoint.waiting_tokens * token_s


def is_slow(state: PoolState, endpoint: Endpoint, now: float, settings: LoadBalancingConfig) -> bool:
    return slowness(endpoint, median_ttft_s(state, now), late_after_s(state, now), now, settings) >= SLOW


def first_token_measured(
    state: PoolState, address: str, seconds: float, now: float, settings: LoadBalancingConfig
) -> PoolState:
    """Record one more time to first token."""
    endpoint = state.get(address)
    if endpoint is None:
        return state
    if seconds >= late_after_s(state, now):
        return _with_late(state, _with_sample(endpoint, seconds, now), endpoint.late_count + 1, now, settings)
    if endpoint.trust == "on_trial":
        return state.replace(_trusted_again(endpoint, median_ttft_s(state, now), now))
    endpoint = _with_sample(endpoint, seconds, now)
    return state.replace(endpoint if endpoint.slow else _replace(endpoint, late_count=0))


def wait_abandoned(
    state: PoolState, address: str, waited_s: float, now: float, settings: LoadBalancingConfig
) -> PoolState:
    """Record a call that ended after `waited_s` without a first token; it counts only if it was late."""
    endpoint = state.get(address)
    if endpoint is None or waited_s < late_after_s(state, now):
        return state
    sampled = _with_sample(endpoint, max(endpoint.ttft_s, 2.0 * waited_s), now)
    return _with_late(state, sampled, endpoint.late_count + 1, now, settings)


def slow_endpoints_due(state: PoolState, now: float, settings: LoadBalancingConfig) -> tuple[str, ...]:
    """Return the endpoints to probe: slow ones whose pause is over, and those one late answer away from slow."""
    untried = [endpoint for endpoint in state.endpoints if endpoint.phase == "active" and endpoint.trust != "on_trial"]
    doubtful = [
        endpoint
        for endpoint in untried
        if (endpoint.slow or endpoint.late_count >= LATE_LIMIT - 1) and now >= endpoint.not_before
    ]
    return tuple(endpoint.address for endpoint in doubtful if is_slow(state, endpoint, now, settings))


def probe_measured(
    state: PoolState, address: str, seconds: float, now: float, settings: LoadBalancingConfig
) -> PoolState:
    """Record that an active endpoint answered a probe after `seconds`; it changes only slow or doubtful ones."""
    endpoint = state.get(address)
    median_s = median_ttft_s(state, now)
    if endpoint is None or not median_s or endpoint.trust == "on_trial" or not is_slow(state, endpoint, now, settings):
        return state
    if not is_as_fast_as_peers(state, seconds, now):
        not_before = max(endpoint.not_before, now + probe_pause_s(endpoint.late_count + 1 - LATE_LIMIT, settings))
        sampled = _with_sample(_replace(endpoint, not_before=not_before), seconds, now)
        return _with_late(state, sampled, endpoint.late_count + 1, now, settings)
    if now < endpoint.not_before:
        return state  # It was probed for another reason, and is to stay out for longer.
    if not endpoint.slow:
        return state.replace(_replace(_with_sample(endpoint, seconds, now), not_before=now + settings.base_ejection_s))
    return state.replace(_replace(endpoint, trust="on_trial", not_before=now))


def is_as_fast_as_peers(state: PoolState, seconds: float, now: float) -> bool:
    """Return whether a probe of this duration was as fast as the other endpoints' answers."""
    median_s = median_ttft_s(state, now)
    return not median_s or seconds < _AS_PEERS * median_s


def _with_sample(endpoint: Endpoint, seconds: float, now: float) -> Endpoint:
    if endpoint.ttft_s <= 0.0:
        return _replace(endpoint, ttft_s=seconds, spread_s=seconds / 2.0, ttft_at=now)
    off_s = seconds - endpoint.ttft_s
    return _replace(
        endpoint,
        ttft_s=endpoint.ttft_s + (_UP if off_s > 0.0 else _DOWN) * off_s,
        spread_s=endpoint.spread_s + _DEVIATION_WEIGHT * (abs(off_s) - endpoint.spread_s),
        ttft_at=now,
    )


def _with_late(
    state: PoolState, endpoint: Endpoint, late_count: int, now: float, settings: LoadBalancingConfig
) -> PoolState:
    is_new = endpoint.trust == "trusted" and endpoint.phase == "active" and late_count >= LATE_LIMIT
    endpoint = _replace(endpoint, late_count=late_count)
    if endpoint.trust == "on_trial" or (is_new and endpoint.ttft_s >= SLOW * _USUAL * median_ttft_s(state, now)):
        times = 0 if now - endpoint.not_before >= settings.max_ejection_s else endpoint.ejections
        not_before = now + ejection_s(times - 1, settings) if times else now
        endpoint = _replace(
            endpoint, trust="slow", ejections=times + 1, not_before=max(endpoint.not_before, not_before)
        )
    return state.replace(endpoint)


def _trusted_again(endpoint: Endpoint, usual_s: float, now: float) -> Endpoint:
    return _replace(endpoint, trust="trusted", late_count=0, ttft_s=usual_s, ttft_at=now)


def _ttft_s(endpoint: Endpoint, now: float) -> float:
    return max(endpoint.ttft_s, _waited_s(endpoint, now))


def _waited_s(endpoint: Endpoint, now: float) -> float:
    return now - endpoint.waiting_since[0] if endpoint.waiting_since else 0.0


def prefix_key(request: Request) -> bytes:
    """Return the prefix key of a request: of a chat's tools and messages up to the first user turn, so that further
    turns do not change it, or of a plain prompt's first 1024 characters.
    """
    if request.kind != "chat":
        return _digest(b"".join(str(prompt)[:_HEAD_CHARACTERS].encode() for prompt in request.prompts[:1]))
    first = 0
    for at, message in enumerate(request.messages):
        if message.role == "user":
            first = at
            break
    return _digest(msgspec.msgpack.encode((request.tools, request.messages[: first + 1])))


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=8).digest()


def choose(
    state: PoolState,
    settings: LoadBalancingConfig,
    *,
    now: float,
    draw: float,
    prompt: Prompt = NO_PROMPT,
    cached: Mapping[str, int] = MappingProxyType({}),
    excluding: Collection[str] = (),
    zone: str = "",
) -> Endpoint | None:
    """Select an endpoint by the numbered steps of this module; None when no active endpoint remains.

    Args:
        draw: Random number in [0, 1).
        cached: Tokens of the prompt that endpoints have, by address.
        excluding: Addresses that must not be selected.
        zone: Zone of the gateway, "" if it has none.
    """
    candidates = [
        endpoint for endpoint in state.endpoints if endpoint.phase == "active" and endpoint.address not in excluding
    ]
    if len(candidates) < 2:
        return candidates[0] if candidates else None  # (1)
    median_s, late_s = median_ttft_s(state, now), late_after_s(state, now)
    slow = {endpoint.address: slowness(endpoint, median_s, late_s, now, settings) for endpoint in candidates}
    loads = {endpoint.address: _load(endpoint, slow[endpoint.address]) for endpoint in candidates}
    if zone:
        near = [
            endpoint
            for endpoint in candidates
            if endpoint.zone == zone and loads[endpoint.address] <= settings.zone_spill_requests
        ]
        candidates = near or candidates  # (2)
    on_trial = next(
        (endpoint for endpoint in candidates if endpoint.trust == "on_trial" and not endpoint.waiting_since), None
    )
    if on_trial is not None and not excluding:
        return on_trial  # (3)
    usual = [endpoint for endpoint in candidates if slow[endpoint.address] < SLOW]
    least = min((loads[endpoint.address] for endpoint in usual), default=math.inf)
    candidates = [
        endpoint for endpoint in candidates if slow[endpoint.address] < SLOW or loads[endpoint.address] < least
    ]  # (4)
    if prompt.blocks:
        # A warm prefix saves less than an endpoint loses that is several times slower than the others.
        return _cheapest(state, usual or candidates, loads, prompt, cached, settings)  # (5)
    if len(candidates) < 2:
        return candidates[0]
    first, second = draw_two(candidates, draw)
    return first if loads[first.address] <= loads[second.address] else second  # (6)


def _load(endpoint: Endpoint, times_slower: float) -> float:
    kv_use = 0.0 if endpoint.reported is None else endpoint.reported.kv_use
    return (endpoint.outstanding + endpoint.others + 1) * times_slower**2 / max(_MIN_KV_FREE, 1.0 - kv_use)


def load_reported(state: PoolState, address: str, load: ServerLoad | None) -> PoolState:
    """Record what a server reports of its load; None: nothing."""
    endpoint = state.get(address)
    if endpoint is None or (load is None and endpoint.reported is None):
        return state
    others = 0 if load is None else max(0, load.requests - endpoint.outstanding)
    return state.replace(_replace(endpoint, reported=load, others=others))


def draw_two(among: Sequence[Endpoint], draw: float) -> tuple[Endpoint, Endpoint]:
    """Return two different endpoints; each ordered pair is equally likely."""
    others = len(among) - 1
    at, second = divmod(int(draw * len(among) * others), others)
    return among[at], among[second + (second >= at)]


def _cheapest(
    state: PoolState,
    among: Sequence[Endpoint],
    loads: Mapping[str, float],
    prompt: Prompt,
    cached: Mapping[str, int],
    settings: LoadBalancingConfig,
) -> Endpoint:
    home = min((endpoint.address for endpoint in state.members), key=lambda each: _digest(prompt.key + each.encode()))
    known = {**cached, home: max(cached.get(home, 0), int(_HOME_SHARE * prompt.tokens))}

    def cost(endpoint: Endpoint) -> float:
        missing = max(0, prompt.tokens - known.get(endpoint.address, 0))
        return missing + settings.load_tokens * loads[endpoint.address]

    return min(among, key=cost)
