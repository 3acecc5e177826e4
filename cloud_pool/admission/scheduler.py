"""Admission decisions: which request is admitted, waits or is shed, in one synchronous call per event. Pure.

Permits, queues and turns count sequences. A request for several arrives as a whole, and is shed as a whole before any
of it runs. Its sequences get their permits one by one: it neither waits for many at once nor holds up others.

On arrival, in this order:
1. No time left: DeadlineExceeded.
2. A permit is free and no ticket is ahead, or one is given back for it (`permits`): it is admitted. Of a request with
   several sequences, as many as there are such permits; 3 and 4 come first if some have to wait.
3. A queue of higher priority is a standing one: Shed (429); bulk first, then standard (`OverloadDetector`).
4. Its last sequence would not be admitted with time enough left for an answer, or, if its own queue is a standing
   one, its first not within the target: Shed (429).
5. The queue is full: the youngest of the lowest priority below it is displaced; else the youngest of a tenant that has
   more of the queue for its weight (`waiting`). The displaced request, or else the new one, gets QueueFull (429).
6. It waits.

A released permit goes to interactive, then standard, then bulk, and within each to the tenants in turn (`waiting`).
Lower priorities still get a small share of the permits, unless a more urgent ticket would miss its deadline for it: no
queue starves, and each such turn makes an interactive request wait for one more release. The last permits are reserved
(`permits`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final, Literal, NoReturn

from causeway_server.router.errors import DeadlineExceeded, QueueFull, Shed
from causeway_server.router.jobs.submission import RANK
from causeway_server.router.types import Priority

from .concurrency_limit import ConcurrencyLimit, OverloadDetector, ReleaseRate
from .permits import AdmissionSettings, PermitAllocator, TierCapacity
from .waiting import Ticket, TicketState, WaitingTickets

Reason = Literal["overload", "deadline", "queue_full", "displaced"]
RETRY_S = 1.0
"""Retry-After while no rate is known yet, in seconds."""
_MAX_RETRY_S = 60.0
_MIN_CREDIT: Final = 8
"""Sequences by which a light tenant may be ahead of its turn, and that it may send at once; a quarter of the permits
where that is more, and never more than there are permits."""


class AdmissionScheduler:
    """A tier's permits and queues. Methods return the tickets whose state changed, so that the caller resumes their
    waiters; `now`: monotonic seconds.
    """

    def __init__(
        self,
        settings: AdmissionSettings,
        now: float,
        on_shed: Callable[[Priority, Reason], None] = lambda priority, reason: None,
    ) -> None:
        self._settings = settings
        self._shares: dict[Priority, float] = {
            "interactive": 1.0,
            "standard": settings.config.standard_share,
            "bulk": settings.config.bulk_share,
        }
        credit = _credit(settings.permits)
        self._waiting = WaitingTickets(settings.max_queued, credit)
        self._turns = dict.fromkeys(RANK, 0.0)
        self._limit = ConcurrencyLimit(settings.min_permits, settings.permits, settings.ttft_objective_s, now)
        self._away = 0
        self._jobs = 0
        self._release_rate = ReleaseRate(now)
        self._overload = OverloadDetector(settings.ttft_objective_s)
        self._permits = PermitAllocator(settings.config, credit, self._waiting.rank_of)
        self._on_shed = on_shed

    # --- state -------------------------------------------------------------------------------------------------------

    @property
    def limit(self) -> int:
        """Current number of permits, including those of requests at endpoints that accept no more."""
        return self._limit.value + self._away

    @property
    def demand(self) -> int:
        """Number of requests that wait or run at endpoints that accept requests."""
        return self._inside + self.waiting

    def lacks_capacity(self, now: float) -> bool:
        """Return whether requests wait, or first tokens come later than those of a server that is not full."""
        return self.waiting > 0 or self._limit.is_late(now)

    @property
    def has_room(self) -> bool:
        """Whether no request waits, and a permit is free."""
        return self._permits.running < self._limit.value + self._away and not len(self._waiting)

    @property
    def running(self) -> int:
        return self._permits.running

    @property
    def pending(self) -> int:
        """Permits of sequences without a first token."""
        return self._permits.pending

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def waiting_of(self, priority: Priority) -> int:
        return len(self._waiting.queues[priority])

    @property
    def held_s(self) -> float | None:
        """Recent mean time for which a permit is held, in seconds; None before the first sample."""
        return self._release_rate.held_s

    def saturated(self, now: float) -> bool:
        """Return whether the interactive or the standard queue is a standing one."""
        return self._overload.is_standing(now, "interactive") or self._overload.is_standing(now, "standard")

    def expected_wait_s(self, priority: Priority) -> float:
        """Return the expected wait of a new request behind all waiters of its priority and above."""
        ahead = self._waiting.count_at_or_above(priority)
        if not ahead and self.running < self.limit:
            return 0.0
        return self._wait_s(priority, ahead) or 0.0

    def retry_after_s(self, priority: Priority) -> float:
        """Return the time in which the current waiters of this priority and above will have been admitted."""
        wait_s = self._wait_s(priority, self._waiting.count_at_or_above(priority))
        return RETRY_S if wait_s is None else min(_MAX_RETRY_S, wait_s)

    # --- events ------------------------------------------------------------------------------------------------------

    def arrive(self, ticket: Ticket, now: float) -> list[Ticket]:
        """Admit the request of this ticket or let it wait, with all its tickets. Raises as the module's docstring says.

        Returns the tickets that made room for it: GONE if displaced from the queue, WAITING again if preempted.
        """
        self._tick(now)
        held_s = self._release_rate.held_s
        limit = self._limit.value + self._away
        self._permits.record_arrival(ticket, now, limit / held_s if held_s else 0.0)
        if ticket.deadline <= now:
            raise DeadlineExceeded("The request's deadline has passed.")  # (1)
        tickets = ticket.siblings or (ticket,)
        if len(tickets) > 1 and len(tickets) > (free := self._count_free(ticket, now)):
            self._check(ticket, now, free)
        entered, moved = self._enter(tickets, now)  # (2)
        if entered == len(tickets):
            return moved
        if len(tickets) == 1:
            self._check(ticket, now)
        if not entered and self._waiting.is_full:
            moved = self._displace_for(ticket)  # (5)
        for each in tickets[entered:]:
            self._waiting.add(each)  # (6)
        return moved

    def leave(self, ticket: Ticket, now: float, used: float | None = None) -> list[Ticket]:
        """Remove a ticket that has ended, failed or left; return those admitted now. `used`: its tokens, if known."""
        self._tick(now)
        if ticket.state is TicketState.WAITING:
            self._waiting.remove(ticket)
            return []
        if not ticket.has_permit:
            return []
        if used is not None:
            self._waiting.of(ticket).correct(ticket, used)
        self._permits.leave(ticket)
        ticket.state = TicketState.GONE
        self._release_rate.record_release(now - ticket.admitted, self.limit)
        return self._fill(now)

    def first_token(self, ticket: Ticket, now: float, seconds: float | None) -> list[Ticket]:
        """Record a first token, `seconds` after the hand-over (None: not reliable); return the admitted tickets."""
        if ticket.state is not TicketState.PENDING:
            return []
        self._tick(now)
        self._permits.got_first_token(ticket)
        self._release_rate.record_first_token(now - ticket.admitted)
        if seconds is not None:
            self._limit.first_token(now, seconds, self._inside)
        return self._fill(now)

    def failed(self, ticket: Ticket, now: float) -> None:
        """Record that the tier refused the request, or was late with its first token."""
        if ticket.state is TicketState.PENDING:
            self._limit.failed(now, ticket.admitted)

    def set_upper_bound(self, permits: int, now: float, capacity: TierCapacity | None = None) -> list[Ticket]:
        """Bound the concurrency limit. Returns the tickets that are admitted because the bound was raised."""
        self._tick(now)
        if capacity is not None:
            self._away = min(capacity.away, self.running)
            self._jobs = capacity.jobs
            self._permits.credit = _credit(capacity.permits)
            for queue in self._waiting.queues.values():
                queue.credit = self._permits.credit
        self._limit.set_upper_bound(permits, now, None if capacity is None else capacity.endpoints)
        return self._fill(now)

    def queue_full_error(self, priority: Priority) -> QueueFull:
        message = f"The tier is full: {self.running} sequences run and {self.waiting} wait."
        return QueueFull(message, retry_after_s=self.retry_after_s(priority))

    # --- arrival -----------------------------------------------------------------------------------------------------

    def _enter(self, tickets: Sequence[Ticket], now: float) -> tuple[int, list[Ticket]]:
        """Admit the first of the tickets, as many as possible. Returns their number, and the tickets that made room."""
        moved: list[Ticket] = []
        for count, ticket in enumerate(tickets):
            if not self._may_enter(ticket, now):
                preempted = self._preempt_for(ticket, now)
                if not preempted:
                    return count, moved
                moved += preempted
            if not count:
                self._overload.record_wait(now, ticket.priority, 0.0)
            self._waiting.queues[ticket.priority].charge(ticket)
            self._permits.enter(ticket, now)
        return len(tickets), moved

    def _count_free(self, ticket: Ticket, now: float) -> int:
        """Return the number of permits that are certainly free for the request of this ticket."""
        if self._waiting.count_at_or_above(ticket.priority):
            return 0
        return max(0, self.limit - self.running - self._reserve(now, self.limit))

    def _may_enter(self, ticket: Ticket, now: float) -> bool:
        limit = self._limit.value + self._away
        free = limit - self._permits.running
        if free <= self._reserve(now, limit):
            return free > 0 and self._permits.may_take_last(ticket, self.limit, now)
        return not self._waiting.count_at_or_above(ticket.priority)

    def _preempt_for(self, ticket: Ticket, now: float) -> list[Ticket]:
        """Preempt one ticket for the new one; if the queue is full, displace another one from it."""
        victim = self._permits.victim(ticket, self.limit, now) if self.running >= self.limit else None
        if victim is None:
            return []
        displaced: list[Ticket] = []
        if self._waiting.is_full:
            displaced = self._waiting.displace_behind(victim)
            if not displaced:
                return []  # All waiters are more urgent than the victim.
            self._on_shed(displaced[0].priority, "displaced")
        self._permits.preempt(victim)
        self._waiting.of(victim).restore(victim)
        return [victim, *displaced]

    def _check(self, ticket: Ticket, now: float, free: int = 0) -> None:
        """Raise Shed if the request of this ticket must not wait; `free`: the permits that it finds free."""
        priority, siblings = ticket.priority, len(ticket.of_request) - 1
        if self._overload.should_shed(now, priority):
            self._shed(priority, "overload", "more urgent work than the tier can serve")  # (3)
        wait_s = 0.0 if free else self._wait_s(priority, self._waiting.count_ahead(ticket))
        last_s = self._wait_s(priority, self._waiting.count_ahead(ticket, siblings - free)) if siblings else wait_s
        if wait_s is None or last_s is None:
            return
        self._overload.record_wait(now, priority, wait_s)  # Predicted: the actual wait would be known much later.
        if now + last_s + max(self._limit.base_s or 0.0, self._release_rate.short_s) > ticket.deadline:
            self._shed(priority, "deadline", "the request would not be admitted with enough time left")  # (4)
        if self._overload.is_standing(now, priority) and wait_s > self._overload.target_s(priority):
            self._shed(priority, "overload", "too many requests wait already")

    def _shed(self, priority: Priority, reason: Reason, why: str) -> NoReturn:
        self._on_shed(priority, reason)
        raise Shed(f"The tier is overloaded: {why}.", retry_after_s=self.retry_after_s(priority))

    def _displace_for(self, ticket: Ticket) -> list[Ticket]:
        """Return the tickets of the request that makes room. Raises QueueFull."""
        displaced = self._waiting.displace_for(ticket)
        if not displaced:
            self._on_shed(ticket.priority, "queue_full")
            raise self.queue_full_error(ticket.priority)
        self._on_shed(displaced[0].priority, "displaced")
        return displaced

    # --- released permits --------------------------------------------------------------------------------------------

    def _fill(self, now: float) -> list[Ticket]:
        admitted: list[Ticket] = []
        while self.waiting and self.running < self.limit and (ticket := self._next(now)) is not None:
            if ticket.deadline <= now + self._release_rate.short_s:
                # The deadline would cut its answer, so a permit would be wasted. Its own timer ends its wait.
                self._waiting.remove(ticket)
                if ticket.is_first:
                    self._on_shed(ticket.priority, "deadline")
                continue
            self._waiting.of(ticket).pop(ticket)
            if ticket.is_first:  # The others wait for their siblings.
                self._overload.record_wait(now, ticket.priority, now - ticket.arrived)
            self._release_rate.record_grant(ticket.priority)
            self._permits.enter(ticket, now)
            admitted.append(ticket)
        for priority, queue in self._waiting.queues.items():
            if not queue.count:
                self._turns[priority] = 0.0
        return admitted

    def _next(self, now: float) -> Ticket | None:
        if self.limit - self.running <= self._reserve(now, self.limit):
            for_reserved = (
                queue.first(lambda candidate: self._permits.may_take_last(candidate, self.limit, now))
                for queue in self._waiting.queues.values()
            )
            return next((ticket for ticket in for_reserved if ticket is not None), None)
        firsts = [ticket for queue in self._waiting.queues.values() if (ticket := queue.first()) is not None]
        if not firsts:
            return None
        chosen = firsts[0]
        for below in firsts[1:]:
            self._turns[below.priority] = min(2.0, self._turns[below.priority] + self._shares[below.priority])
            if self._turns[below.priority] >= 1.0 and chosen is firsts[0] and not self._is_pressed(below, now):
                self._turns[below.priority] -= 1.0
                chosen = below
        return chosen

    def _is_pressed(self, below: Ticket, now: float) -> bool:
        """Return whether a more urgent ticket would miss its deadline for one more turn of a lower priority."""
        rate = self._release_rate.rate
        turns_s = 2.0 / rate if rate else 0.0
        by = now + turns_s + (self._limit.base_s or 0.0)
        return any(ticket.deadline < by for ticket in self._waiting.more_urgent(below))

    def _reserve(self, now: float, limit: int) -> int:
        reserve = self._permits.reserve(limit, now, self._jobs)
        if not reserve:
            return 0
        pending_share = self._release_rate.pending_share
        if pending_share is not None and self._permits.is_bunched(pending_share * limit):
            return limit
        return min(reserve, self._limit.headroom) if self._limit.is_untried(now) else reserve

    # --- books -------------------------------------------------------------------------------------------------------

    @property
    def _inside(self) -> int:
        """Number of requests at endpoints that accept requests."""
        return max(0, self.running - self._away)

    def _tick(self, now: float) -> None:
        waiting = len(self._waiting)
        self._release_rate.tick(now, full=waiting > 0)
        if waiting and waiting >= self.limit / 2:
            self._permits.note_crowding(now)

    def _wait_s(self, priority: Priority, ahead: int) -> float | None:
        """Return the time until a permit is granted after `ahead` others; None while no rate is known."""
        rate = self._release_rate.rate_for(priority, self._shares[priority])
        if rate is None:
            return None
        return (ahead + 1) / rate if rate > 0.0 else math.inf


def _credit(permits: int) -> float:
    """Return the credit of a light tenant, in sequences, in a tier of so many permits."""
    return min(permits, max(_MIN_CREDIT, permits / 4))
