"""What the choice is made from: one tier's endpoints, frozen. Times are monotonic seconds."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

import msgspec

Phase = Literal["in", "ejected", "draining"]
Trust = Literal["whole", "slow", "tried"]


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    address: str
    zone: str = ""
    phase: Phase = "in"
    since: float = -math.inf  # when the phase began
    open: tuple[float, ...] = ()  # when each open lease began, the oldest first
    waiting: tuple[float, ...] = ()  # those of them without a first token
    ttft_s: float = 0.0  # moving mean of the time to the first token; 0: not measured
    ttft_at: float = 0.0
    spread_s: float = 0.0  # moving mean of how far off it single times are
    lates: int = 0  # first tokens in a row that were late
    trust: Trust = "whole"  # that it is as quick as its peers
    faults: int = 0  # in a row
    fault: str = ""  # code of the last one, "" when an answer came since
    ejections: int = 0  # in a row
    silences: int = 0  # probes in a row without an answer
    until: float = 0.0  # one that is ejected or slow is not asked before
    asked: bool = False  # a probe is under way

    @property
    def outstanding(self) -> int:
        return len(self.open)

    @property
    def slow(self) -> bool:
        """Several times slower than its peers, as far as is known: only probes ask it, and then one request."""
        return self.trust != "whole"


class PoolState(msgspec.Struct, frozen=True):
    endpoints: tuple[Endpoint, ...] = ()

    def get(self, address: str) -> Endpoint | None:
        return next((one for one in self.endpoints if one.address == address), None)

    def put(self, changed: Endpoint) -> PoolState:
        """With `changed` in the place of the endpoint of its address; nothing where that one is gone."""
        return PoolState(tuple(changed if one.address == changed.address else one for one in self.endpoints))

    @property
    def members(self) -> tuple[Endpoint, ...]:
        """Those that are named; a draining one is not."""
        return tuple(one for one in self.endpoints if one.phase != "draining")

    @property
    def healthy(self) -> int:
        return sum(one.phase == "in" for one in self.endpoints)


def without(times: tuple[float, ...], time: float) -> tuple[float, ...]:
    """`times` less one that equals `time`."""
    if time not in times:
        return times
    at = times.index(time)
    return times[:at] + times[at + 1 :]


def state_of(endpoints: Iterable[Endpoint]) -> PoolState:
    return PoolState(tuple(endpoints))
