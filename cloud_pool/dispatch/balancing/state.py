"""The frozen state of one tier's endpoints, from which the next one is selected. Times are monotonic seconds."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

import msgspec

Phase = Literal["active", "ejected", "draining"]
Trust = Literal["trusted", "slow", "on_trial"]


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

    @property
    def outstanding(self) -> int:
        return len(self.open_since)

    @property
    def slow(self) -> bool:
        """Several times slower than its peers, as far as is known: it gets probes, then one trial request."""
        return self.trust != "trusted"


class PoolState(msgspec.Struct, frozen=True):
    endpoints: tuple[Endpoint, ...] = ()

    def get(self, address: str) -> Endpoint | None:
        return next((one for one in self.endpoints if one.address == address), None)

    def replace(self, changed: Endpoint) -> PoolState:
        """Return the state with `changed` in place of the endpoint of that address, if it is still there."""
        return PoolState(tuple(changed if one.address == changed.address else one for one in self.endpoints))

    @property
    def members(self) -> tuple[Endpoint, ...]:
        """The listed endpoints, which excludes those that drain."""
        return tuple(one for one in self.endpoints if one.phase != "draining")

    @property
    def healthy(self) -> int:
        return sum(one.phase == "active" for one in self.endpoints)


def without(times: tuple[float, ...], time: float) -> tuple[float, ...]:
    """Return `times` less one item that equals `time`."""
    if time not in times:
        return times
    at = times.index(time)
    return times[:at] + times[at + 1 :]


def state_of(endpoints: Iterable[Endpoint]) -> PoolState:
    return PoolState(tuple(endpoints))
