"""Who goes into a tier, who waits, and who is turned away: one synchronous decision for each event. Pure.

Arriving, in this order:
1. no time left: DeadlineExceeded
2. a place is free for it, and nobody is before it, or one is given back for it (places): it goes in
3. a queue above it stands: Shed (503): bulk first, then standard (overload)
4. it would not go in with time enough left for an answer, or, where its own queue stands, within the target: Shed (503)
5. the queue is full: the youngest of the lowest priority below it gives way; else the youngest of a tenant that has
   more of the queue for its weight; each of them, or else itself, gets QueueFull (429)
6. it waits

A place that comes free goes to interactive, then standard, then bulk, inside each to the tenants in turn (fair). Those
below get their small share of places all the same, unless somebody above would miss its deadline for it: what waits
is never starved, and each such turn makes an interactive request wait for one more place. The last places are for some
only (places).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, Literal, NoReturn

from router.errors import DeadlineExceeded, QueueFull, Shed

from .concurrency_limit import ConcurrencyLimit
from .config import AdmissionSettings
from .fair_queue import FairQueue
from .overload import OverloadDetector
from .permits import PermitAllocator
from .release_rate import ReleaseRate
from .ticket import RANK, Priority, Ticket, TicketState

Reason = Literal["overload", "deadline", "queue_full", "displaced"]
RETRY_S = 1.0
"""Where nothing is known yet."""
_MOST_S = 60.0
_CREDIT: Final = 8
"""Requests by which a tenant that asks little may be before its turn, and that it may ask at once; or a quarter of the
places; never more than there are places."""


class AdmissionScheduler:
    """Owns the places and the queues. What it returns has changed state, and is to be told; `now` is monotonic, s."""

    def __init__(
        self,
        settings: AdmissionSettings,
        now: float,
        shed: Callable[[Priority, Reason], None] = lambda priority, reason: None,
    ) -> None:
        self._settings = settings
        self._shares: dict[Priority, float] = {
            "interactive": 1.0,
            "standard": settings.config.standard_share,
            "bulk": settings.config.bulk_share,
        }
        credit = min(settings.places, max(_CREDIT, settings.places / 4))
        self._queues: dict[Priority, FairQueue] = {priority: FairQueue(credit) for priority in RANK}
        self._turns = dict.fromkeys(RANK, 0.0)
        self._limit = ConcurrencyLimit(
            settings.min_places or settings.places, settings.places, settings.ttft_objective_s, now
        )
        self._drain = ReleaseRate(now)
        self._overload = OverloadDetector(settings.ttft_objective_s)
        self._places = PermitAllocator(settings.config, credit)
        self._shed = shed

    # --- what there is -----------------------------------------------------------------------------------------------

    @property
    def limit(self) -> int:
        return self._limit.value

    @property
    def running(self) -> int:
        return self._places.running

    @property
    def pending(self) -> int:
        """Without a first token yet."""
        return self._places.pending

    @property
    def waiting(self) -> int:
        return sum(map(len, self._queues.values()))

    def waiting_of(self, priority: Priority) -> int:
        return len(self._queues[priority])

    @property
    def held_s(self) -> float | None:
        """How long a place is held; None where nothing is known yet."""
        return self._drain.held_s

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

    def arrive(self, ticket: Ticket, now: float) -> list[Ticket]:
        """`ticket` goes in or waits. Those who had to make room for it: GONE from the queue, or from a place and
        WAITING once more. Raises DeadlineExceeded, Shed or QueueFull."""
        self._tick(now)
        self._places.came(ticket, now, self.limit / self._drain.held_s if self._drain.held_s else 0.0)
        if ticket.deadline <= now:
            raise DeadlineExceeded("the time for this request is over")  # (1)
        moved: list[Ticket] = []
        if self._may_enter(ticket, now) or (moved := self._preempted_for(ticket, now)):
            self._overload.waited(now, ticket.priority, 0.0)
            self._queues[ticket.priority].charge(ticket)
            self._places.enter(ticket, now)  # (2)
            return moved
        self._check(ticket, now)
        if self.waiting >= self._settings.queue:
            moved = [self._makes_room(ticket)]  # (5)
            self._give_way(moved[0])
        self._queues[ticket.priority].add(ticket)  # (6)
        ticket.state = TicketState.WAITING
        return moved

    def leave(self, ticket: Ticket, now: float, used: float | None = None) -> list[Ticket]:
        """It is done, has failed or gave up, also while it waited: those who go in now. `used`: tokens, where known."""
        self._tick(now)
        if ticket.state is TicketState.WAITING:
            self._remove(ticket)
            return []
        if not ticket.has_permit:
            return []
        if used is not None:
            self._queues[ticket.priority].correct(ticket, used)
        self._places.leave(ticket)
        ticket.state = TicketState.GONE
        self._drain.freed(now - ticket.admitted, self.limit)
        return self._fill(now)

    def first_token(self, ticket: Ticket, now: float, seconds: float | None) -> list[Ticket]:
        """`seconds` from handing to Triton; None: as it was seen it says nothing. Those who go in because the limit has
        grown."""
        if ticket.state is not TicketState.PENDING:
            return []
        self._tick(now)
        self._places.spoke(ticket)
        if seconds is not None:
            self._limit.first_token(now, seconds, self.running)
        return self._fill(now)

    def failed(self, ticket: Ticket, now: float) -> None:
        """The tier would not take it, or gave it no first token in time."""
        if ticket.state is TicketState.PENDING:
            self._limit.failed(now, ticket.admitted)

    def bound(self, most: int, now: float) -> list[Ticket]:
        """No more places than that from now on. Those who go in because it is more than before."""
        self._tick(now)
        self._limit.bound(most, now)
        return self._fill(now)

    def full(self, priority: Priority) -> QueueFull:
        what = f"{self.running} requests run and {self.waiting} wait: the tier is full"
        return QueueFull(what, retry_after_s=self.retry_after(priority))

    # --- arriving ----------------------------------------------------------------------------------------------------

    def _may_enter(self, ticket: Ticket, now: float) -> bool:
        free = self.limit - self.running
        if free <= self._reserve(now):
            return free > 0 and self._places.may_take_last(ticket, self.limit, now)
        return not any(len(queue) for each, queue in self._queues.items() if RANK[each] <= ticket.rank)

    def _preempted_for(self, ticket: Ticket, now: float) -> list[Ticket]:
        """Who has made room for it: one gave its place back, and where the queue is full another leaves that."""
        victim = self._places.victim(ticket, self.limit, now) if self.running >= self.limit else None
        if victim is None:
            return []
        moved = [victim]
        if self.waiting >= self._settings.queue:
            behind = (self._queues[each].youngest() for each in reversed(RANK) if RANK[each] >= victim.rank)
            youngest = next((each for each in behind if each is not None), None)
            if youngest is None:
                return []  # All who wait are more urgent than the victim.
            self._give_way(youngest)
            moved.append(youngest)
        self._places.preempt(victim)
        self._queues[victim.priority].restore(victim)
        return moved

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
        if now + wait_s + max(self._limit.base_s or 0.0, self._drain.short_s) > ticket.deadline:
            self._refuse(priority, "deadline", "it would not go in with time enough left")  # (4)
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

    def _give_way(self, ticket: Ticket) -> None:
        self._remove(ticket)
        self._shed(ticket.priority, "displaced")

    # --- places ------------------------------------------------------------------------------------------------------

    def _fill(self, now: float) -> list[Ticket]:
        entered: list[Ticket] = []
        while self.waiting and self.running < self.limit and (ticket := self._next(now)) is not None:
            if ticket.deadline <= now + self._drain.short_s:
                # A place would be wasted on it: its answer would be cut by the deadline. Its own timer tells it.
                self._remove(ticket)
                self._shed(ticket.priority, "deadline")
                continue
            self._queues[ticket.priority].take(ticket)
            self._overload.waited(now, ticket.priority, now - ticket.arrived)
            self._drain.given(ticket.priority)
            self._places.enter(ticket, now)
            entered.append(ticket)
        for priority, queue in self._queues.items():
            if not len(queue):
                self._turns[priority] = 0.0
        return entered

    def _next(self, now: float) -> Ticket | None:
        if self.limit - self.running <= self._reserve(now):
            spared = (
                queue.first(lambda one: self._places.may_take_last(one, self.limit, now))
                for queue in self._queues.values()
            )
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

    def _reserve(self, now: float) -> int:
        held_s, base_s = self._drain.held_s, self._limit.base_s
        evenly = self.limit * base_s / held_s if held_s and base_s else math.inf
        reserve = self._places.reserve(self.limit, now, evenly)
        return min(reserve, self._limit.spare) if self._limit.is_untried(now) else reserve

    # --- books -------------------------------------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        self._drain.tick(now, full=self.waiting > 0)
        if self.waiting >= self.limit / 2:
            self._places.crowd(now)

    def _wait_s(self, priority: Priority, ahead: int) -> float | None:
        """Until the next place after `ahead` others is given; None where nothing is known."""
        rate = self._drain.rate_for(priority, self._shares[priority])
        if rate is None:
            return None
        return (ahead + 1) / rate if rate > 0.0 else math.inf

    def _remove(self, ticket: Ticket) -> None:
        self._queues[ticket.priority].drop(ticket)
        ticket.state = TicketState.GONE
