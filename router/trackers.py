"""Trackers that a process keeps in memory: fair shares of callers, latencies, circuit breakers, money spent.

Each tracker has one owner. Time is an argument, and memory is bounded.
"""

from __future__ import annotations

import ipaddress
import math
from collections import deque
from collections.abc import Hashable
from datetime import UTC, date, datetime, tzinfo
from functools import lru_cache
from typing import ClassVar, Literal

import msgspec

from .types import SpendSignals

MAX_CLIENTS = 4096
BreakerState = Literal["closed", "open", "half_open"]
_UNKNOWN_WEIGHT = 1 / 64  # below this weight, six half-lives after a single sample, the mean is unknown
_WINDOW_CALLS = 256  # number of newest outcomes that a breaker keeps
_DAYS = 62  # two months, so that the current month is always complete
_HOUR_MINUTES = 60


class FairShare:
    """The shares of a bounded pool: connections, sessions, streams, calls, bytes in memory. No caller can take all of
    it. A caller that holds nothing gets any free amount that it requests, up to half of the pool. A caller that holds
    some gets more as long as its total is then at most the amount that is left free: the dynamic threshold of Choudhury
    and Hahne ("Dynamic queue length thresholds for shared-memory packet switches", 1998). One caller gets at most half
    of the pool, two get a third each, n get 1/(n+1), so that there is always room for a new caller. Each operation
    takes constant time.

    Args:
        capacity: Size of the pool, in places or bytes.
    """

    __slots__ = ("_by_caller", "_by_holder", "capacity", "held")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held = 0
        self._by_caller: dict[str, int] = {}
        self._by_holder: dict[Hashable, tuple[str, int]] = {}

    def held_by(self, caller: str) -> int:
        return self._by_caller.get(caller, 0)

    def hold(self, holder: Hashable, caller: str, amount: int = 1) -> bool:
        """Set the amount that `holder`, such as the id of a request, holds for its caller. Returns False, and changes
        nothing, if that exceeds the caller's share.
        """
        before = self._by_holder.get(holder, ("", 0))[1]
        others = self._by_caller.get(caller, 0) - before
        free = self.capacity - self.held + before - amount
        if (
            free < 0
            or others + amount > max(1, self.capacity // 2)
            or (others and amount > before and others + amount > free + amount)
        ):
            return False
        self._set(holder, caller, amount - before, amount)
        return True

    def count(self, holder: Hashable, caller: str) -> None:
        """Count a place whose limit is enforced elsewhere, such as a connection."""
        self._set(holder, caller, 1 - self._by_holder.get(holder, ("", 0))[1], 1)

    def release(self, holder: Hashable) -> None:
        """Release everything that a holder holds, if anything."""
        caller, amount = self._by_holder.pop(holder, ("", 0))
        if amount:
            self.held -= amount
            left = self._by_caller[caller] - amount
            if left:
                self._by_caller[caller] = left
            else:
                del self._by_caller[caller]

    def crowds(self, caller: str) -> bool:
        """Return whether a caller holds at least the mean of all callers, and should release places first."""
        return self._by_caller.get(caller, 0) * len(self._by_caller) >= self.held

    def _set(self, holder: Hashable, caller: str, change: int, amount: int) -> None:
        self.held += change
        self._by_caller[caller] = self._by_caller.get(caller, 0) + change
        self._by_holder[holder] = caller, amount


def stored_share(capacity: int, others: bool) -> int:
    """Return the maximum that a caller may keep in a pool of long-lived content, such as uploaded files. It is half of
    the pool if others keep something there, else seven eighths, which leaves room for a new caller.
    """
    return max(1, capacity // 2) if others else capacity - capacity // 8


@lru_cache(MAX_CLIENTS)
def network_of(client: str) -> str:
    """Return the caller that an address stands for: the /64 network of an IPv6 address (one customer, RFC 6177), the
    IPv4 address of a mapped one, otherwise the client's name.
    """
    try:
        address = ipaddress.IPv6Address(client)
    except ValueError:
        return client
    return str(address.ipv4_mapped or ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))


class Ewma:
    """An exponentially weighted mean, in the unit of the samples: the weight of a sample halves every `half_life_s`.
    Weights decay with time, not with the number of samples: ten simultaneous samples weigh ten times as much as one,
    and without new samples the mean expires. Source: exponential decay by age, section 3 of
    https://dimacs.rutgers.edu/~graham/pubs/papers/fwddecay.pdf.
    """

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._sum = 0.0
        self._weight = 0.0
        self._at = 0.0

    def add(self, value: float, now: float) -> None:
        decay = self._decay(now)
        self._sum = self._sum * decay + value
        self._weight = self._weight * decay + 1.0
        self._at = max(self._at, now)

    def value(self, now: float) -> float | None:
        """Return the mean; None without recent samples."""
        if self._weight * self._decay(now) < _UNKNOWN_WEIGHT:
            return None
        return self._sum / self._weight

    def _decay(self, now: float) -> float:
        if self._weight == 0.0:
            return 0.0
        return float(0.5 ** (max(0.0, now - self._at) / self._half_life_s))


class Window:
    """The newest `size` samples of the last `window_s` seconds. Reading a quantile sorts them: O(size log size)."""

    def __init__(self, window_s: float, size: int = 512) -> None:
        self._window_s = window_s
        self._samples: deque[tuple[float, float]] = deque(maxlen=size)  # (when, value)

    def add(self, value: float, now: float) -> None:
        self._samples.append((now, value))

    def count(self, now: float) -> int:
        return len(self._recent(now))

    def quantile(self, q: float, now: float) -> float | None:
        """Return the smallest sample that a share `q` (0..1) of the samples does not exceed; None without samples."""
        if not 0.0 <= q <= 1.0:
            raise ValueError(f"Expected a share from 0 to 1, not {q!r}.")
        values = sorted(self._recent(now))
        if not values:
            return None
        rank = math.ceil(q * len(values) - 1e-9)  # 0.07 * 100 is slightly above 7 in floating point
        return values[max(0, rank - 1)]

    def _recent(self, now: float) -> list[float]:
        while self._samples and self._samples[0][0] <= now - self._window_s:
            self._samples.popleft()
        return [value for _, value in self._samples]


class Breaker:
    """A circuit breaker, which stops requests to a failing target and probes it until it recovers.

    Call `allow` before a request, and exactly one of `success`, `failure` or `cancelled` after it. It opens after
    `failures` consecutive failures, or at a share of failures among the calls of the last `window_s`. After `open_s` it
    allows one probing call at a time; each failed probe doubles the pause.
    """

    failures: ClassVar[int] = 5  # consecutive failures after which it opens
    rate: ClassVar[float] = 0.5  # share of failures in `window_s` at which it opens, if there are at least `min_calls`
    window_s: ClassVar[float] = 30.0
    min_calls: ClassVar[int] = 10
    open_s: ClassVar[float] = 5.0  # first pause; each failed probe doubles it, up to `max_open_s`
    max_open_s: ClassVar[float] = 60.0
    probe_s: ClassVar[float] = 60.0  # time without a result after which another call may probe

    def __init__(self) -> None:
        self._consecutive = 0
        self._calls: deque[tuple[float, bool]] = deque(maxlen=_WINDOW_CALLS)  # (when, failed)
        self._opened: float | None = None  # None: closed
        self._pause = self.open_s
        self._probe: float | None = None  # when the current probe started

    def state(self, now: float) -> BreakerState:
        if self._opened is None:
            return "closed"
        return "half_open" if now >= self._opened + self._pause else "open"

    def allow(self, now: float) -> bool:
        """Return whether a call may be made. In half-open the first call is the probe; it must report its result."""
        state = self.state(now)
        if state != "half_open":
            return state == "closed"
        if self._probe is not None and now < self._probe + self.probe_s:
            return False
        self._probe = now
        return True

    def success(self, now: float) -> None:
        """Record a success. If the breaker is open, it belongs to an earlier call and proves nothing."""
        if self.state(now) == "open":
            return
        if self._opened is not None:
            self._opened, self._pause, self._probe = None, self.open_s, None
            self._calls.clear()
        self._consecutive = 0
        self._calls.append((now, False))

    def failure(self, now: float) -> None:
        state = self.state(now)
        if state == "open" or (state == "half_open" and self._probe is None):
            return  # an earlier call: the target's failure is already known
        if state == "half_open":
            self._open(now, min(self._pause * 2.0, self.max_open_s))
            return
        self._consecutive += 1
        self._calls.append((now, True))
        if self._consecutive >= self.failures or self._rate_exceeded(now):
            self._open(now, self.open_s)

    def cancelled(self, now: float) -> None:
        """Record a call without information about the target. In half-open, another call may probe."""
        if self.state(now) == "half_open":
            self._probe = None

    def retry_after_s(self, now: float) -> float:
        """Return the seconds until a call is allowed; 0 if it is allowed now."""
        return 0.0 if self._opened is None else max(0.0, self._opened + self._pause - now)

    def _rate_exceeded(self, now: float) -> bool:
        recent = [failed for when, failed in self._calls if when > now - self.window_s]
        return len(recent) >= self.min_calls and sum(recent) >= self.rate * len(recent)

    def _open(self, now: float, pause_s: float) -> None:
        self._opened = now
        self._pause = pause_s
        self._probe = None
        self._consecutive = 0
        self._calls.clear()


class SpendState(msgspec.Struct, frozen=True):
    """The state to restore after a restart. Dates are local, ISO 8601."""

    days: tuple[tuple[str, float], ...] = ()  # (date, US dollars), oldest first
    minutes: tuple[tuple[int, float], ...] = ()  # (Unix minute, US dollars)


class SpendTracker:
    """Adds up spending in US dollars over the last hour, the local day and the local month, kept by date, so that it
    survives clock jumps. `zone`: None for the system's.
    """

    def __init__(self, zone: tzinfo | None = None, restored: SpendState | None = None) -> None:
        state = restored or SpendState()
        self._zone = zone
        self._days = dict(state.days)
        self._minutes = dict(state.minutes)

    def add(self, usd: float, now_unix: float) -> None:
        """Add an amount. Raises ValueError if it is negative or not finite."""
        if not 0.0 <= usd < float("inf"):
            raise ValueError(f"Expected an amount of at least 0 USD, not {usd!r}.")
        if usd == 0.0:
            return
        day, minute = self._day(now_unix), int(now_unix // 60)
        self._days[day] = round(self._days.get(day, 0.0) + usd, 12)  # whole numbers of 1e-12 USD
        self._minutes[minute] = round(self._minutes.get(minute, 0.0) + usd, 12)
        self._drop_distant(minute, day)

    def signals(self, now_unix: float) -> SpendSignals:
        minute, day = int(now_unix // 60), self._day(now_unix)
        month = day[:7]
        return SpendSignals(
            usd_hour=sum(usd for when, usd in self._minutes.items() if abs(when - minute) < _HOUR_MINUTES),
            usd_today=self._days.get(day, 0.0),
            usd_month=sum(usd for known, usd in self._days.items() if known[:7] == month),
        )

    def state(self) -> SpendState:
        return SpendState(days=tuple(sorted(self._days.items())), minutes=tuple(sorted(self._minutes.items())))

    def local(self, now_unix: float) -> tuple[str, float]:
        """Return the local date, ISO 8601, and the hours of it that have passed."""
        now = datetime.fromtimestamp(now_unix, UTC).astimezone(self._zone)
        return now.date().isoformat(), now.hour + now.minute / 60 + now.second / 3600

    def _day(self, now_unix: float) -> str:
        return datetime.fromtimestamp(now_unix, UTC).astimezone(self._zone).date().isoformat()

    def _drop_distant(self, minute: int, day: str) -> None:
        # Drop by distance from now, not by age: entries of a clock far in the future must not displace current days.
        self._minutes = {when: usd for when, usd in self._minutes.items() if abs(when - minute) < _HOUR_MINUTES}
        if len(self._days) > _DAYS:
            today = date.fromisoformat(day)
            nearest = sorted(self._days, key=lambda known: abs(date.fromisoformat(known) - today))[:_DAYS]
            self._days = {known: self._days[known] for known in nearest}
