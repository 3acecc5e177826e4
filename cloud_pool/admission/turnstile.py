"""Who goes into a tier, who waits, and who is turned away: one synchronous decision for each event. Pure.

Arriving, in this order:
1. no time left: DeadlineExceeded
2. a place is free for it, and nobody is before it: it goes in
3. a queue above it stands: Shed (503): bulk first, then standard (overload)
4. it would not go in within its time, or, where its own queue stands, within the target: Shed (503)
5. the queue is full: the youngest of the lowest priority below it gives way; else the youngest of a tenant that has
   more of the queue for its weight; each of them, or else itself, gets QueueFull (429)
6. it waits

A place that comes free goes to interactive, then standard, then bulk, inside each to the tenants in turn (fair). Those
below get their small share of places all the same, unless somebody above would miss its deadline for it: what waits
is never starved, and each such turn makes an interactive request wait for one more place.
The last places (trunk reservation, known from telephone networks) are kept while work is mixed: only a tenant that has
less than its share of the places gets one, for interactive work, or for standard work with less than half its share;
so a flood of answers that run for seconds leaves no queue before those who ask little. There are as many of them as
such tenants needed of late (peaks), at most half.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, NoReturn

from router.errors import DeadlineExceeded, QueueFull, Shed

from .drain import Drain
from .fair import FairQueue
from .limit import Limit
from .overload import Overload
from .peaks import Peaks
from .settings import Settings
from .ticket import RANK, Priority, State, Ticket

Reason = Literal["overload", "deadline", "queue_full", "gave_way"]
RETRY_S = 1.0
"""Where nothing is known yet."""
_MOST_S = 60.0
_MIXED_S = 10.0
_RESERVED: Final[dict[Priority, float]] = {"interactive": 1.0, "standard": 0.5, "bulk": 0.0}
"""How much of its share of places a tenant may have and still take one of the last."""


@dataclass(slots=True)
class Party:
    """A tenant that is here."""

    weight: float
    held: int = 0  # places
    count: int = 0  # of all its requests here


class Turnstile:
    """Owns the places and the queues. What it returns has changed state, and is to be told; `now` is monotonic, s."""

    def __init__(
        self, settings: Settings, now: float, shed: Callable[[Priority, Reason], None] = lambda priority, reason: None
    ) -> None:
        self._settings = settings
        self._shares: dict[Priority, float] = {
            "interactive": 1.0,
            "standard": settings.config.standard_share,
            "bulk": settings.config.bulk_share,
        }
        self._queues: dict[Priority, FairQueue] = {priority: FairQueue() for priority in RANK}
        self._turns = dict.fromkeys(RANK, 0.0)
        self._parties: dict[str, Party] = {}
        self._limit = Limit(settings.min_places or settings.places, settings.places, settings.ttft_objective_s, now)
        self._drain = Drain(now)
        self._overload = Overload(settings.ttft_objective_s)
        self._shed = shed
        self._last = ("", False)
        self._mixed_at = -math.inf
        self._peaks = Peaks()
        self.running = 0
        self.pending = 0

    # --- what there is -----------------------------------------------------------------------------------------------

    @property
    def limit(self) -> int:
        return self._limit.value

    @property
    def waiting(self) -> int:
        return sum(map(len, self._queues.values()))

    def waiting_of(self, priority: Priority) -> int:
        return len(self._queues[priority])

    def saturated(self, now: float) -> bool:
        """A queue stands, and not only of bulk."""
        return self._overload.stands(now, "interactive") or self._overload.stands(now, "standard")

    def seconds(self, priority: Priority) -> float:
        """What a newcomer would wait, behind all who wait at its priority and above."""
        ahead = sum(len(queue) for each, queue in self._queues.items() if RANK[each] <= RANK[priority])
        if not ahead and self.running < self.limit:
            return 0.0
        return self._wait_s(priority, ahead) or 0.0

    def retry_after(self, priority: Priority) -> float:
        """When those who wait now at its priority and above will have gone in, s."""
        ahead = sum(len(queue) for each, queue in self._queues.items() if RANK[each] <= RANK[priority])
        wait_s = self._wait_s(priority, ahead)
        return RETRY_S if wait_s is None else min(_MOST_S, wait_s)

    # --- what happens ------------------------------------------------------------------------------------------------

    def arrive(self, ticket: Ticket, now: float) -> Ticket | None:
        """`ticket` goes in or waits; another may have had to give way. Raises DeadlineExceeded, Shed or QueueFull."""
        self._tick(now)
        self._mix(ticket, now)
        if ticket.deadline <= now:
            raise DeadlineExceeded("the time for this request is over")  # (1)
        if self._may_enter(ticket, now):
            self._overload.waited(now, ticket.priority, 0.0)
            self._queues[ticket.priority].charge(ticket)
            self._admit(ticket, now)  # (2)
            return None
        self._check(ticket, now)
        gives_way = None
        if self.waiting >= self._settings.queue:
            gives_way = self._makes_room(ticket)  # (5)
            self._remove(gives_way)
            self._shed(gives_way.priority, "gave_way")
        self._party(ticket).count += 1
        self._seen(ticket, now)
        self._queues[ticket.priority].add(ticket)  # (6)
        ticket.state = State.WAITING
        return gives_way

    def leave(self, ticket: Ticket, now: float, used: float | None = None) -> list[Ticket]:
        """It is done, has failed or gave up, also while it waited: those who go in now. `used`: tokens, where known."""
        self._tick(now)
        if ticket.state is State.WAITING:
            self._remove(ticket)
            return []
        if not ticket.has_place:
            return []
        if used is not None:
            self._queues[ticket.priority].correct(ticket, used)
        self.pending -= ticket.state is State.PENDING
        self.running -= 1
        self._parties[ticket.tenant].held -= 1
        self._gone(ticket)
        self._drain.freed(now - ticket.admitted, self.limit)
        return self._fill(now)

    def first_token(self, ticket: Ticket, now: float, seconds: float) -> list[Ticket]:
        """`seconds` from handing to Triton. Those who go in because the limit has grown."""
        if ticket.state is not State.PENDING:
            return []
        self._tick(now)
        ticket.state = State.RUNNING
        self.pending -= 1
        self._limit.first_token(now, seconds, self.running)
        return self._fill(now)

    def failed(self, ticket: Ticket, now: float) -> None:
        """The tier would not take it, or gave it no first token in time."""
        if ticket.state is State.PENDING:
            self._limit.failed(now, ticket.admitted)

    def full(self, priority: Priority) -> QueueFull:
        what = f"{self.running} requests run and {self.waiting} wait: the tier is full"
        return QueueFull(what, retry_after_s=self.retry_after(priority))

    # --- arriving ----------------------------------------------------------------------------------------------------

    def _may_enter(self, ticket: Ticket, now: float) -> bool:
        free = self.limit - self.running
        if free <= self._reserve(now):
            return free > 0 and self._is_spared(ticket)
        return not any(len(queue) for each, queue in self._queues.items() if RANK[each] <= ticket.rank)

    def _check(self, ticket: Ticket, now: float) -> None:
        """Raises Shed."""
        priority = ticket.priority
        if self._overload.sheds(now, priority):
            self._refuse(priority, "overload", "there is more urgent work than the tier can do")  # (3)
        ahead = sum(len(queue) for each, queue in self._queues.items() if RANK[each] < ticket.rank)
        wait_s = self._wait_s(priority, ahead + self._queues[priority].ahead(ticket))
        if wait_s is None:
            return
        self._overload.waited(now, priority, wait_s)  # Known now; it would be told much later.
        base_s = self._limit.base_s or 0.0
        if now + wait_s + base_s > ticket.deadline:
            self._refuse(priority, "deadline", "it would not go in within its time")  # (4)
        if self._overload.stands(now, priority) and wait_s > self._overload.target_s(priority):
            self._refuse(priority, "overload", "too many wait already")

    def _refuse(self, priority: Priority, reason: Reason, why: str) -> NoReturn:
        self._shed(priority, reason)
        raise Shed(f"the tier is overloaded: {why}", retry_after_s=self.retry_after(priority))

    def _makes_room(self, ticket: Ticket) -> Ticket:
        """Raises QueueFull."""
        for priority in reversed(RANK):
            if RANK[priority] > ticket.rank and (found := self._queues[priority].youngest()) is not None:
                return found
        found = self._queues[ticket.priority].over_share(ticket)
        if found is None:
            self._shed(ticket.priority, "queue_full")
            raise self.full(ticket.priority)
        return found

    # --- places ------------------------------------------------------------------------------------------------------

    def _fill(self, now: float) -> list[Ticket]:
        entered = []
        while self.running < self.limit and (ticket := self._next(now)) is not None:
            self._queues[ticket.priority].take(ticket)
            self._gone(ticket)
            if ticket.deadline <= now:
                continue  # Its own timer tells it.
            self._overload.waited(now, ticket.priority, now - ticket.arrived)
            self._drain.given(ticket.priority)
            self._admit(ticket, now)
            entered.append(ticket)
        for priority, queue in self._queues.items():
            if not len(queue):
                self._turns[priority] = 0.0
        return entered

    def _next(self, now: float) -> Ticket | None:
        if self.limit - self.running <= self._reserve(now):
            spared = (queue.first(self._is_spared) for queue in self._queues.values())
            return next((ticket for ticket in spared if ticket is not None), None)
        firsts = [ticket for queue in self._queues.values() if (ticket := queue.first()) is not None]
        if not firsts:
            return None
        chosen = firsts[0]
        for below in firsts[1:]:
            turns = self._turns[below.priority] + self._shares[below.priority]
            self._turns[below.priority] = min(2.0, turns)
            if self._turns[below.priority] >= 1.0 and chosen is firsts[0] and not self._pressed(below, now):
                self._turns[below.priority] -= 1.0
                chosen = below
        return chosen

    def _pressed(self, below: Ticket, now: float) -> bool:
        """Whether somebody above would miss its deadline for one more turn."""
        rate = self._drain.rate
        turns_s = 2.0 / rate if rate else 0.0
        by = now + turns_s + (self._limit.base_s or 0.0)
        above = (queue for each, queue in self._queues.items() if RANK[each] < below.rank)
        return any(ticket.deadline < by for queue in above for ticket in queue)

    def _admit(self, ticket: Ticket, now: float) -> None:
        ticket.state, ticket.admitted = State.PENDING, now
        party = self._party(ticket)
        party.count += 1
        party.held += 1
        self._seen(ticket, now)
        self.running += 1
        self.pending += 1

    def _reserve(self, now: float) -> int:
        """Places that not everybody may have."""
        if now - self._mixed_at > _MIXED_S:
            return 0
        reserved = int(self.limit * self._settings.config.reserve + 0.5)
        kept = self._peaks.kept({tenant: party.held for tenant, party in self._parties.items()}, self.limit, now)
        reserved = max(reserved, min(int(kept + 0.5), self.limit // 2))
        return min(reserved, self._limit.spare) if self._limit.is_untried(now) else reserved

    def _is_spared(self, ticket: Ticket) -> bool:
        """Whether it may have one of the last places."""
        party = self._parties.get(ticket.tenant)
        others = sum(each.weight for tenant, each in self._parties.items() if tenant != ticket.tenant)
        share = self.limit * ticket.weight / (ticket.weight + others)
        return (party.held if party else 0) < share * _RESERVED[ticket.priority]

    def _seen(self, ticket: Ticket, now: float) -> None:
        if ticket.priority != "bulk":
            self._peaks.seen(ticket.tenant, self._party(ticket).count, ticket.weight, now)

    def _mix(self, ticket: Ticket, now: float) -> None:
        kind = (ticket.tenant, ticket.priority == "interactive")
        if kind != self._last and self._last != ("", False):
            self._mixed_at = now
        self._last = kind

    # --- books -------------------------------------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        self._drain.tick(now, full=self.waiting > 0)

    def _wait_s(self, priority: Priority, ahead: int) -> float | None:
        """Until the next place after `ahead` others is given; None where nothing is known."""
        rate = self._drain.rate_for(priority, self._shares[priority])
        if rate is None:
            return None
        return (ahead + 1) / rate if rate > 0.0 else math.inf

    def _party(self, ticket: Ticket) -> Party:
        return self._parties.setdefault(ticket.tenant, Party(ticket.weight))

    def _remove(self, ticket: Ticket) -> None:
        self._queues[ticket.priority].drop(ticket)
        self._gone(ticket)

    def _gone(self, ticket: Ticket) -> None:
        ticket.state = State.GONE
        party = self._parties[ticket.tenant]
        party.count -= 1
        if not party.count:
            del self._parties[ticket.tenant]
