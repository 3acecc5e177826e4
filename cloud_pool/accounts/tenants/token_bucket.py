"""The token bucket. It holds `capacity` at most and gains `rate` a second; scripts.TAKE does the same in Redis.

A bucket may be in debt: an answer that was longer than reserved is paid for before the next one begins.
"""

from __future__ import annotations

import msgspec


class TokenBucket(msgspec.Struct, frozen=True):
    level: float
    at: float  # s, when it had this level

    def filled(self, rate: float, capacity: float, now: float) -> TokenBucket:
        """A clock that was set back gains nothing, and loses nothing."""
        gained = max(0.0, now - self.at) * rate
        return TokenBucket(min(capacity, self.level + gained), now)

    def wait_s(self, rate: float, amount: float) -> float:
        """Until `amount` is there; 0 when it is."""
        return max(0.0, amount - self.level) / rate

    def less(self, amount: float, capacity: float) -> TokenBucket:
        """`amount` < 0 gives back."""
        return TokenBucket(min(capacity, self.level - amount), self.at)
