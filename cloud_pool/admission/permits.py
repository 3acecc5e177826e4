"""Who has a place, who may have one of the last, and who has to give his back. Pure.

The last places (trunk reservation, known from telephone networks) are kept while work is mixed: for interactive work
and for tenants that ask little, who hold less than their share of the places, half of it while many wait, or up to
twice their share while they have credit. A tenant's share of what comes free adds to its credit, and each of its
requests takes from it, whether it goes in or not: a flood has none as soon as it begins, and who asks for no more than
its share always has some. So a flood leaves room for them; while many wait one place more where what it got begins all
at once, for then nothing comes free for as long as an answer takes. Where those who ask little come so close together
that this does not do, one of the flood's gives its place back (preemption), if it can do so unnoticed:

1. it has had no token yet, so its caller has seen nothing of it
2. it is less urgent than an interactive newcomer, or not more urgent and of a tenant that asks much
3. it has not lost its place MOST times already, and has time enough to wait once more

Of those the least urgent, and of equals the last who came, who loses least: it goes back to the head of its tenant's
queue. What its server had begun for it is lost, so that is done for a small share of the requests only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .config import AdmissionConfig
from .ticket import RANK, Ticket, TicketState

MOST = 2
_LATE_S = 10.0
_CROWDED_S = 5.0
_LITTLE = 0.5  # of a tenant's share of the places, while many wait
_BURST = 2.0  # times its share, on credit
_FEWEST = 4  # places of which one is kept
_WAITS_S = 2.0  # who has less time left is left alone
_SAVED = 4  # preemptions for which none was needed before


@dataclass(slots=True)
class TenantPermits:
    """A tenant that was here of late. Its places and requests by the rank of their priority: less urgent ones do not
    count."""

    tenant: str
    weight: float
    credits: list[float]  # requests
    held: list[int]  # places
    at: float  # monotonic, s: when it last came


class PermitAllocator:
    """Owns the books of places. Nobody has more than `credit` requests of it; `now` is monotonic, s."""

    def __init__(self, config: AdmissionConfig, credit: float) -> None:
        self._config = config
        self._credit = credit
        self._pending: dict[Ticket, None] = {}  # in the order in which they went in
        self._parties: dict[str, TenantPermits] = {}  # in the order in which they last came
        self._weights = 0.0
        self._urgent_at = self._other_at = -math.inf
        self._crowded_at = -math.inf
        self._saved = float(config.preemption_share > 0.0)
        self.running = 0

    @property
    def pending(self) -> int:
        """Of those who run: without a token yet."""
        return len(self._pending)

    # --- books -------------------------------------------------------------------------------------------------------

    def came(self, ticket: Ticket, now: float, rate: float) -> None:
        """Whatever becomes of it. `rate`: so many places come free a second, where all are taken."""
        party = self._forget(ticket.tenant) or self._new(ticket, now)
        party.weight = ticket.weight
        self._add(party, now, rate)
        for rank in range(ticket.rank, len(RANK)):
            party.credits[rank] = max(-self._credit, party.credits[rank] - 1.0)
        if ticket.priority == "interactive":
            self._urgent_at = now
        else:
            self._other_at = now
        while now - (oldest := next(iter(self._parties.values()))).at > _LATE_S:
            self._forget(oldest.tenant)
            if oldest.held[-1]:
                self._add(oldest, now, rate)  # It is still here.

    def _new(self, ticket: Ticket, now: float) -> TenantPermits:
        return TenantPermits(ticket.tenant, ticket.weight, [self._credit] * len(RANK), [0] * len(RANK), now)

    def _add(self, party: TenantPermits, now: float, rate: float) -> None:
        self._parties[party.tenant] = party  # the last one now
        self._weights += party.weight
        earned = rate * (now - party.at) * party.weight / self._weights
        party.credits = [min(self._credit, credit + earned) for credit in party.credits]
        party.at = now

    def _forget(self, tenant: str) -> TenantPermits | None:
        party = self._parties.pop(tenant, None)
        self._weights -= party.weight if party is not None else 0.0
        return party

    def crowd(self, now: float) -> None:
        """Many wait."""
        self._crowded_at = now

    def enter(self, ticket: Ticket, now: float) -> None:
        ticket.state, ticket.admitted = TicketState.PENDING, now
        self.running += 1
        self._pending[ticket] = None
        self._hold(ticket, 1)
        self._saved = min(_SAVED, self._saved + self._config.preemption_share)

    def spoke(self, ticket: Ticket) -> None:
        ticket.state = TicketState.RUNNING
        del self._pending[ticket]

    def leave(self, ticket: Ticket) -> None:
        self.running -= 1
        self._pending.pop(ticket, None)
        self._hold(ticket, -1)

    def _hold(self, ticket: Ticket, places: int) -> None:
        if (party := self._parties.get(ticket.tenant)) is not None:
            for rank in range(ticket.rank, len(RANK)):
                party.held[rank] += places

    def preempt(self, victim: Ticket) -> None:
        self._saved -= 1.0
        self.leave(victim)
        victim.state = TicketState.WAITING
        victim.preempted += 1

    # --- who may -----------------------------------------------------------------------------------------------------

    def reserve(self, limit: int, now: float, evenly: float = math.inf) -> int:
        """Places of `limit` that not everybody may have. `evenly`: as many would be without a token, if those who have
        a place had come evenly."""
        kinds = now - min(self._urgent_at, self._other_at) <= _LATE_S
        reserve = self._kept(limit) if kinds or self._are_tenants_mixed else 0
        bunched = self._are_tenants_mixed and self._is_crowded(now) and self.pending >= max(1.0, evenly - 0.5)
        return reserve + 1 if reserve and bunched else reserve

    def _kept(self, limit: int) -> int:
        """One at least, where there are some: a limit that was cut is when it matters."""
        share = self._config.reserved_share
        return max(int(limit * share + 0.5), int(share > 0.0 and limit >= _FEWEST))

    def may_take_last(self, ticket: Ticket, limit: int, now: float) -> bool:
        if ticket.priority == "bulk" or (ticket.priority == "standard" and not self._are_tenants_mixed):
            return False
        return self._asks_little(ticket, limit, now)

    def victim(self, ticket: Ticket, limit: int, now: float) -> Ticket | None:
        """Who gives his place to the newcomer; None: nobody."""
        if self._saved < 1.0 or ticket.priority == "bulk" or not self._asks_little(ticket, limit, now):
            return None
        able = [each for each in reversed(self._pending) if self._gives_way(each, ticket, limit, now)]
        return max(able, key=_rank, default=None)

    def _gives_way(self, each: Ticket, ticket: Ticket, limit: int, now: float) -> bool:
        if not each.preemptible or each.preempted >= MOST or each.deadline < now + _WAITS_S:
            return False  # (3)
        if each.rank > ticket.rank and ticket.priority == "interactive":
            return True  # (2)
        return each.tenant != ticket.tenant and each.rank >= ticket.rank and not self._asks_little(each, limit, now)

    def _asks_little(self, ticket: Ticket, limit: int, now: float) -> bool:
        party = self._parties.get(ticket.tenant)
        if not self._are_tenants_mixed or party is None:
            return True
        share = limit * party.weight / self._weights
        held = party.held[ticket.rank]
        if held < (_LITTLE * share if self._is_crowded(now) else share):
            return True
        return party.credits[ticket.rank] >= 0.0 and held < _BURST * share

    def _is_crowded(self, now: float) -> bool:
        return now - self._crowded_at <= _CROWDED_S

    @property
    def _are_tenants_mixed(self) -> bool:
        return len(self._parties) > 1


def _rank(ticket: Ticket) -> int:
    return ticket.rank
