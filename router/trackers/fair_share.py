"""The shares of a bounded pool: connections, sessions, streams, calls, bytes in memory. No caller takes all of it.

A caller that holds nothing gets what it asks for where that is free, up to half of the pool. One that holds something
gets more while it then holds no more than it leaves free: the dynamic threshold of Choudhury and Hahne ("Dynamic queue
length thresholds for shared-memory packet switches", 1998). One caller has half of the pool at most, two have a third
each, n have 1/(n+1), so that a caller that comes new finds room, however many flood.

Each operation costs a few look-ups, whatever the number of callers.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Hashable
from functools import lru_cache

MAX_CLIENTS = 4096


class FairShare:
    """Who holds how much of one pool.

    Args:
        capacity: Size of the pool, in places or bytes.
    """

    __slots__ = ("_by_caller", "_by_holder", "capacity", "held")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held = 0
        self._by_caller: dict[str, int] = {}
        self._by_holder: dict[Hashable, tuple[str, int]] = {}

    @property
    def most(self) -> int:
        """The most that one caller may hold."""
        return max(1, self.capacity // 2)

    def held_by(self, caller: str) -> int:
        return self._by_caller.get(caller, 0)

    def holds(self, holder: Hashable) -> bool:
        return holder in self._by_holder

    def hold(self, holder: Hashable, caller: str, amount: int = 1) -> bool:
        """Let `holder`, such as the id of a request, hold `amount` for its caller, in place of what it held.

        Returns False, and changes nothing, where the caller's share of the pool is less.
        """
        before = self._by_holder.get(holder, ("", 0))[1]
        others = self._by_caller.get(caller, 0) - before
        free = self.capacity - self.held + before - amount
        if free < 0 or others + amount > self.most or (others and amount > before and others + amount > free + amount):
            return False
        self._set(holder, caller, amount - before, amount)
        return True

    def count(self, holder: Hashable, caller: str) -> None:
        """Count a place that is bounded elsewhere, such as a connection that others make room for."""
        self._set(holder, caller, 1 - self._by_holder.get(holder, ("", 0))[1], 1)

    def release(self, holder: Hashable) -> None:
        """End what a holder holds; nothing if it holds nothing."""
        caller, amount = self._by_holder.pop(holder, ("", 0))
        if amount:
            self.held -= amount
            left = self._by_caller[caller] - amount
            if left:
                self._by_caller[caller] = left
            else:
                del self._by_caller[caller]

    def crowds(self, caller: str) -> bool:
        """Whether a caller holds at least as much as the mean of all callers: it gives way first."""
        return self._by_caller.get(caller, 0) * len(self._by_caller) >= self.held

    def _set(self, holder: Hashable, caller: str, change: int, amount: int) -> None:
        self.held += change
        self._by_caller[caller] = self._by_caller.get(caller, 0) + change
        self._by_holder[holder] = caller, amount


def stored_share(capacity: int, others: bool) -> int:
    """Return the most that one caller may keep in a pool whose contents stay, such as uploaded files.

    It is half while others keep something there, else all but an eighth, which a caller that comes new finds.
    """
    return max(1, capacity // 2) if others else capacity - capacity // 8


@lru_cache(MAX_CLIENTS)
def network_of(client: str) -> str:
    """Return the caller that an address stands for: the /64 of an IPv6 address (one customer, RFC 6177), the IPv4
    address of a mapped one, otherwise the client's name.
    """
    try:
        address = ipaddress.IPv6Address(client)
    except ValueError:
        return client
    return str(address.ipv4_mapped or ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))
