"""One tenant's limits at one gateway, without Redis: a share of each rate, and of what is left of the day's budget."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from .config import MICRO_USD_PER_USD, TenantLimits
from .usage import Charge, Reservation


class TokenBucket(msgspec.Struct):
    """A local token bucket. It holds at most `capacity` and gains `rate` per second, as lua/token_bucket.lua does.

    A bucket may be in debt: an answer that was longer than reserved is paid for before the next one begins.
    """

    rate: float  # 0: no limit
    capacity: float
    level: float
    at: float  # monotonic, s: when the bucket had this level

    def refill(self, now: float) -> None:
        """Bring the bucket to `now`. A clock that was set back changes nothing."""
        self.level = min(self.capacity, self.level + max(0.0, now - self.at) * self.rate)
        self.at = now

    def wait_s(self, amount: float) -> float:
        """Return the time until the bucket holds `amount`; 0 if it does."""
        return max(0.0, amount - self.level) / self.rate if self.rate else 0.0

    def debit(self, amount: float) -> None:
        """Take `amount`; a negative amount is a refund."""
        self.level = min(self.capacity, self.level - amount)


Exhausted = Literal["", "budget", "reserved", "requests", "tokens"]
"""What does not allow a request; "reserved": the rest of the budget is reserved for requests in progress."""


class LocalLimits:
    """Owns the tenant's buckets and reservations of this gateway.

    Args:
        share: of the rates and of the rest of the budget
        day: UTC day, as 2026-11-21
        used_micro_usd: of the day's budget, spent or reserved, when Redis was last reached
        now: monotonic, s
    """

    def __init__(self, limits: TenantLimits, share: float, day: str, used_micro_usd: int, now: float) -> None:
        requests, tokens = max(1.0, limits.request_capacity * share), limits.tokens_per_minute * share
        self._requests = TokenBucket(limits.requests_per_s * share, requests, requests, now)
        self._tokens = TokenBucket(tokens / 60.0, tokens, tokens, now)
        self._micro_usd_per_day = limits.usd_per_day * MICRO_USD_PER_USD
        self._share = share
        self._day = day
        self._used_micro_usd = used_micro_usd
        self._spent_micro_usd = 0
        self.doubtful: dict[str, tuple[float, float]] = {}  # charges that Redis may have made, too: requests, tokens
        self._reserved: dict[str, tuple[Reservation, float]] = {}  # by id, with when it ends (monotonic, s)

    def take(self, reservation: Reservation, ends_at: float, day: str, now: float) -> tuple[Exhausted, float]:
        """Take a request, its tokens and its cost: all or nothing.

        Returns:
            What is exhausted, and the time to wait, s.
        """
        self._begin_day(day)
        others = sum(each.micro_usd for each, _ in self._reserved.values() if each.id != reservation.id)
        budget = (self._micro_usd_per_day - self._used_micro_usd) * self._share - self._spent_micro_usd
        if reservation.micro_usd and reservation.micro_usd > budget:
            return "budget", 0.0
        if reservation.micro_usd and reservation.micro_usd > budget - others:
            return "reserved", 0.0
        tokens = min(float(reservation.tokens), self._tokens.capacity)
        sequences = min(float(reservation.sequences), self._requests.capacity)
        self._requests.refill(now)
        self._tokens.refill(now)
        if (wait_s := self._requests.wait_s(sequences)) > 0:
            return "requests", wait_s
        if (wait_s := self._tokens.wait_s(tokens)) > 0:
            return "tokens", wait_s
        self._requests.debit(sequences)
        self._tokens.debit(tokens)
        if reservation.id:
            self._reserved[reservation.id] = reservation, ends_at
        return "", 0.0

    def debit_tokens(self, amount: float) -> None:
        """Take tokens, also into debt; a negative amount is a refund."""
        self._tokens.debit(amount)

    def doubt(self, charge: str, requests: float, tokens: float) -> None:
        """Note a charge that was made here after its reply from Redis was lost: Redis may have made it, too."""
        self.doubtful[charge] = min(requests, self._requests.capacity), min(tokens, self._tokens.capacity)

    def settle(self, charge: Charge, day: str) -> None:
        """Replace a reservation of this gateway by what it has cost; one that was made in Redis is settled there."""
        self._begin_day(day)
        reservation = charge.reservation
        if self._reserved.get(reservation.id, (None,))[0] == reservation:
            del self._reserved[reservation.id]
        elif reservation.id:
            return
        self._spent_micro_usd += charge.micro_usd

    def missing(self, now: float) -> tuple[float, float]:
        """Return how many requests and tokens the buckets lack, after refilling."""
        self._requests.refill(now)
        self._tokens.refill(now)
        return self._requests.capacity - self._requests.level, self._tokens.capacity - self._tokens.level

    def reservations(self, now: float) -> Iterator[tuple[Reservation, float]]:
        """Yield the reservations in progress, each with the time until it ends, s."""
        for reservation, ends_at in self._reserved.values():
            if ends_at > now:
                yield reservation, ends_at - now

    def _begin_day(self, day: str) -> None:
        if day != self._day:
            self._day, self._used_micro_usd, self._spent_micro_usd = day, 0, 0
