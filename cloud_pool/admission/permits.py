"""Permits: which tickets hold one, may have a reserved one, or have to give theirs back. Pure.

A permit is one sequence: a request for many holds many, and counts as many.

The last permits (trunk reservation, known from telephone networks) are reserved while work is mixed. They are for
interactive requests and for light tenants: those that hold less than their share of the permits (half of it while many
requests wait), or up to twice their share while they have credit. A tenant earns credit with its share of the released
permits, and each of its sequences costs some, admitted or not: a flood has none as soon as it begins, and a tenant that
stays within its share always has some. A tenant whose sequences wait earns none: it takes all that it gets. So a flood
leaves room for light tenants. Its sequences do not all start at once, because then none could be preempted, and no
permit would be released, for as long as an answer takes: where more have no first token than if they had come evenly,
all free permits are reserved. Where requests of light tenants come so close together that this is not enough, a
sequence of the flood gives its permit back (preemption), if its caller does not notice:

1. It has had no token yet, so its caller has seen nothing of it.
2. It is less urgent than an interactive newcomer, or not more urgent and of a tenant that is not light.
3. It was not preempted MAX_PREEMPTIONS times already, and has time enough to wait once more.

Of those, the least urgent is preempted, and of equals the last that was admitted, which loses least: it goes back to
the head of its tenant's queue. What its server had begun for it is lost, so only few requests may cause a preemption.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated

import msgspec
from msgspec import Meta

from causeway_server.router.jobs.submission import RANK

from .waiting import Ticket, TicketState

Share = Annotated[float, Meta(ge=0, le=0.5)]
MAX_PREEMPTIONS = 2
_PRESENT_S = 10.0
_CROWDED_S = 5.0
_CROWDED_SHARE = 0.5  # of a tenant's share of the permits, while many requests wait
_CREDIT_SHARE = 2.0  # times its share, on credit
_MIN_LIMIT = 4  # permits of which one is reserved
_MIN_LEFT_S = 2.0  # a request with less time left is not preempted
_MAX_SAVED = 4  # preemptions saved up while none was needed
_EVEN = 0.5  # sequences without a first token beyond those that there would be if they came evenly


class AdmissionConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tier's key `admission`."""

    reserved_share: Share = 0.08
    preemption_share: Share = 0.1
    standard_share: Share = 0.05
    bulk_share: Share = 0.02


class TierCapacity(msgspec.Struct, frozen=True):
    """Current capacity of a tier."""

    permits: int  # of all gateways and workers
    endpoints: float  # as many as take requests
    jobs: int = 0  # this gateway's part of the permits that jobs hold
    away: int = 0  # open calls of this process at endpoints that take no more requests


class AdmissionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a tier's admission, with the tier's limits."""

    permits: int  # upper bound of the sequences in Triton at once; PeerHeartbeat changes it
    max_queued: int  # sequences that may wait for their request to begin
    min_permits: int = 0  # lower bound of the concurrency limit; 0: the limit is fixed at `permits`
    ttft_objective_s: float = 2.0  # of an interactive request, queue and Triton together
    config: AdmissionConfig = AdmissionConfig()


@dataclass(slots=True)
class TenantPermits:
    """A tenant with recent requests. Permits and credits are counted by rank: those of less urgent requests do not
    count against more urgent ones."""

    tenant: str
    weight: float
    credits: list[float]  # sequences
    held: list[int]  # permits
    at: float  # monotonic, s: its last request


class PermitAllocator:
    """Accounts of the permits. A tenant's credit is at most `credit` sequences; `now`: monotonic seconds.

    `waiting_rank` returns the rank of a tenant's most urgent waiting sequence, the number of ranks where none waits.
    """

    def __init__(
        self, config: AdmissionConfig, credit: float, waiting_rank: Callable[[str], int] = lambda tenant: len(RANK)
    ) -> None:
        self._config = config
        self.credit = credit
        self._waiting_rank = waiting_rank
        self._pending: dict[Ticket, None] = {}  # in the order of their admission
        self._tenants: dict[str, TenantPermits] = {}  # in the order of their last requests
        self._weights = 0.0
        self._urgent_at = self._other_at = -math.inf
        self._crowded_at = -math.inf
        self._saved = float(config.preemption_share > 0.0)
        self.running = 0

    @property
    def pending(self) -> int:
        """Permits of preemptible sequences without a first token."""
        return len(self._pending)

    # --- books -------------------------------------------------------------------------------------------------------

    def record_arrival(self, ticket: Ticket, now: float, rate: float) -> None:
        """Record a request's arrival by one of its tickets. `rate`: permits released per second while all are held."""
        tenant = self._forget(ticket.tenant) or self._new(ticket, now)
        tenant.weight = ticket.weight
        self._add(tenant, now, rate)
        sequences = len(ticket.siblings) or 1
        for rank in range(RANK[ticket.priority], len(RANK)):
            tenant.credits[rank] = max(-self.credit, tenant.credits[rank] - sequences)
        if ticket.priority == "interactive":
            self._urgent_at = now
        else:
            self._other_at = now
        while now - (oldest := next(iter(self._tenants.values()))).at > _PRESENT_S:
            self._forget(oldest.tenant)
            if oldest.held[-1] or self._waiting_rank(oldest.tenant) < len(RANK):
                self._add(oldest, now, rate)  # It still holds permits, or waits for some.

    def _new(self, ticket: Ticket, now: float) -> TenantPermits:
        return TenantPermits(ticket.tenant, ticket.weight, [self.credit] * len(RANK), [0] * len(RANK), now)

    def _add(self, tenant: TenantPermits, now: float, rate: float) -> None:
        self._tenants[tenant.tenant] = tenant  # now the last one
        self._weights += tenant.weight
        earned = rate * (now - tenant.at) * tenant.weight / self._weights
        for rank in range(self._waiting_rank(tenant.tenant)):
            tenant.credits[rank] = min(self.credit, tenant.credits[rank] + earned)
        tenant.at = now

    def _forget(self, name: str) -> TenantPermits | None:
        tenant = self._tenants.pop(name, None)
        self._weights -= tenant.weight if tenant is not None else 0.0
        return tenant

    def note_crowding(self, now: float) -> None:
        """Note that many requests wait."""
        self._crowded_at = now

    def enter(self, ticket: Ticket, now: float) -> None:
        ticket.state, ticket.admitted = TicketState.PENDING, now
        self.running += 1
        if ticket.preemptible:
            self._pending[ticket] = None
        self._add_held(ticket, 1)
        self._saved = min(_MAX_SAVED, self._saved + self._config.preemption_share)

    def got_first_token(self, ticket: Ticket) -> None:
        ticket.state = TicketState.RUNNING
        self._pending.pop(ticket, None)

    def leave(self, ticket: Ticket) -> None:
        self.running -= 1
        self._pending.pop(ticket, None)
        self._add_held(ticket, -1)

    def _add_held(self, ticket: Ticket, permits: int) -> None:
        if (tenant := self._tenants.get(ticket.tenant)) is not None:
            for rank in range(RANK[ticket.priority], len(RANK)):
                tenant.held[rank] += permits

    def preempt(self, victim: Ticket) -> None:
        self._saved -= 1.0
        self.leave(victim)
        victim.state = TicketState.WAITING
        victim.preempted += 1

    # --- reserved permits and preemption -----------------------------------------------------------------------------

    def reserve(self, limit: int, now: float, jobs: int = 0) -> int:
        """Return how many permits of `limit` are reserved. Those of `jobs` are, too, except for one."""
        are_priorities_mixed = now - min(self._urgent_at, self._other_at) <= _PRESENT_S
        if not are_priorities_mixed and len(self._tenants) < 2:
            return 0
        return max(self._base_reserve(limit), min(self._base_reserve(limit) + jobs, limit - 1))

    def is_bunched(self, even_pending: float) -> bool:
        """Return whether too many sequences started together beside another tenant: all free permits are reserved.

        `even_pending`: held permits without a first token if requests had come evenly.
        """
        return self._are_tenants_mixed and self.pending >= even_pending + _EVEN

    def _base_reserve(self, limit: int) -> int:
        """Return the basic reserve: at least 1 from `_MIN_LIMIT` on, as it matters most while the limit is low."""
        share = self._config.reserved_share
        return max(int(limit * share + 0.5), int(share > 0.0 and limit >= _MIN_LIMIT))

    def may_take_last(self, ticket: Ticket, limit: int, now: float) -> bool:
        if ticket.priority == "bulk" or (ticket.priority == "standard" and not self._are_tenants_mixed):
            return False
        return self._is_light(ticket, limit, now)

    def victim(self, ticket: Ticket, limit: int, now: float) -> Ticket | None:
        """Return the ticket that gives its permit to the new one; None if there is none."""
        if self._saved < 1.0 or ticket.priority == "bulk" or not self._is_light(ticket, limit, now):
            return None
        preemptible = [each for each in reversed(self._pending) if self._is_preemptible(each, ticket, limit, now)]
        return max(preemptible, key=attrgetter("rank"), default=None)

    def _is_preemptible(self, each: Ticket, ticket: Ticket, limit: int, now: float) -> bool:
        if each.preempted >= MAX_PREEMPTIONS or each.deadline < now + _MIN_LEFT_S:
            return False  # (3)
        if each.rank > ticket.rank and ticket.priority == "interactive":
            return True  # (2)
        return each.tenant != ticket.tenant and each.rank >= ticket.rank and not self._is_light(each, limit, now)

    def _is_light(self, ticket: Ticket, limit: int, now: float) -> bool:
        tenant = self._tenants.get(ticket.tenant)
        if not self._are_tenants_mixed or tenant is None:
            return True
        share = limit * tenant.weight / self._weights
        held = tenant.held[ticket.rank]
        if held < (_CROWDED_SHARE * share if now - self._crowded_at <= _CROWDED_S else share):
            return True
        return tenant.credits[ticket.rank] >= 0.0 and held < _CREDIT_SHARE * share

    @property
    def _are_tenants_mixed(self) -> bool:
        return len(self._tenants) > 1
