"""A local token bucket. Pure: time is an argument."""

from __future__ import annotations

import msgspec


class TokenBucket(msgspec.Struct, frozen=True):
    """A local token bucket. It holds at most `capacity` and gains `rate` per second, as lua/token_bucket.lua does.

    A bucket may be in debt: an answer that was longer than reserved is paid for before the next one begins.
    """

    level: float
    at: float  # monotonic, s: when the bucket had this level

    def refilled(self, rate: float, capacity: float, now: float) -> TokenBucket:
        """Return the bucket at `now`. A clock that was set back changes nothing."""
        gained = max(0.0, now - self.at) * rate
        return TokenBucket(min(capacity, self.level + gained), now)

    def wait_s(self, rate: float, amount: float) -> float:
        """Return the time until the bucket holds `amount`; 0 if it does."""
        return max(0.0, amount - self.level) / rate

    def debited(self, amount: float, capacity: float) -> TokenBucket:
        """Return the bucket without `amount`; a negative amount is a refund."""
        return TokenBucket(min(capacity, self.level - amount), self.at)
