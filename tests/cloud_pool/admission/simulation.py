"""A tier in virtual time: a server with `slots` sequences, the scheduler before it, and callers. No clock, no sleep.

The server answers up to `slots` requests at once and lets the others wait inside, first come first served: the knee
that the limit has to find. A request is prefilled (its time to first token on a free server) and decoded.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from causeway_server.cloud_pool.admission.permits import AdmissionConfig, AdmissionSettings
from causeway_server.cloud_pool.admission.scheduler import AdmissionScheduler, Reason
from causeway_server.cloud_pool.admission.waiting import Ticket, TicketState
from causeway_server.router.errors import CausewayError, DeadlineExceeded
from causeway_server.router.types import Priority

Profile = Callable[[float], float]
"""Something over time."""


def flat(value: float) -> Profile:
    return lambda now: value


def between(begins: float, ends: float, value: float) -> Profile:
    return lambda now: value if begins <= now < ends else 0.0


@dataclass(frozen=True)
class Server:
    slots: Profile
    prefill_s: Profile
    decode_s: Profile
    prefill_cv: float = 0.3
    decode_cv: float = 0.5

    def capacity(self, now: float = 0.0) -> float:
        """Requests a second."""
        return self.slots(now) / (self.prefill_s(now) + self.decode_s(now))


def server(slots: float = 32, prefill_s: float = 0.3, decode_s: float = 2.0) -> Server:
    return Server(flat(slots), flat(prefill_s), flat(decode_s))


@dataclass(frozen=True)
class Callers:
    """Independent callers, `rate` requests a second."""

    rate: Profile
    priority: Priority = "interactive"
    tenant: str = "one"
    weight: float = 1.0
    patience_s: float = 30.0
    tokens: float = 100.0


@dataclass
class RequestResult:
    """The result of one request; times are since its arrival, s."""

    callers: Callers
    arrived: float
    queued_s: float | None = None
    first_s: float | None = None
    done_s: float | None = None
    error: CausewayError | None = None


@dataclass
class Run:
    results: list[RequestResult] = field(default_factory=list)
    limits: list[tuple[float, int]] = field(default_factory=list)
    inside: list[tuple[float, int]] = field(default_factory=list)  # waiting in the server
    waiting: list[tuple[float, int]] = field(default_factory=list)  # in the queue
    saturated: list[tuple[float, bool]] = field(default_factory=list)
    preempted: int = 0
    shed: Counter[tuple[Priority, Reason]] = field(default_factory=Counter)

    def of(self, begins: float = 0.0, ends: float = math.inf, **wanted: str) -> list[RequestResult]:
        """Return the requests that arrived in this time."""
        found = (one for one in self.results if begins <= one.arrived < ends)
        return [one for one in found if all(getattr(one.callers, name) == value for name, value in wanted.items())]

    def goodput(self, begins: float, ends: float) -> float:
        """Answers a second."""
        done = (one.arrived + one.done_s for one in self.results if one.done_s is not None)
        return sum(begins <= at < ends for at in done) / (ends - begins)

    def mean(self, samples: list[tuple[float, int]], begins: float, ends: float) -> float:
        found = [value for at, value in samples if begins <= at < ends]
        return sum(found) / len(found)


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def first_token_times(results: list[RequestResult]) -> list[float]:
    return [one.first_s for one in results if one.first_s is not None]


class Simulation:
    def __init__(self, server: Server, callers: list[Callers], settings: AdmissionSettings, seed: int = 1) -> None:
        self._server = server
        self._callers = callers
        self._chance = random.Random(seed)
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[float], object]]] = []
        self._inside: deque[Ticket] = deque()
        self._busy = 0
        self._results: dict[Ticket, RequestResult] = {}
        self.run = Run()
        self.scheduler = AdmissionScheduler(
            settings, 0.0, lambda priority, reason: self.run.shed.update([(priority, reason)])
        )

    def until(self, ends: float) -> Run:
        for callers in self._callers:
            self._schedule_arrival(0.0, callers)
        self._at(0.05, self._sample)
        while self._events and self._events[0][0] < ends:
            now, _, event = heapq.heappop(self._events)
            event(now)
        return self.run

    # --- callers -----------------------------------------------------------------------------------------------------

    def _schedule_arrival(self, now: float, callers: Callers) -> None:
        rate = callers.rate(now)
        if rate:
            self._at(now + self._chance.expovariate(rate), lambda at: self._arrive(at, callers))
        else:
            self._at(now + 0.1, lambda at: self._schedule_arrival(at, callers))

    def _arrive(self, now: float, callers: Callers) -> None:
        self._schedule_arrival(now, callers)
        if not callers.rate(now):
            return
        ends = now + callers.patience_s
        ticket = Ticket(callers.priority, callers.tenant, callers.weight, callers.tokens, now, ends)
        result = self._results[ticket] = RequestResult(callers, now)
        self.run.results.append(result)
        try:
            moved = self.scheduler.arrive(ticket, now)
        except CausewayError as error:
            result.error = error
            return
        for each in moved:
            if each.state is TicketState.WAITING:
                self._stop(each)
            else:
                self._results[each].error = self.scheduler.queue_full_error(each.priority)
        if ticket.has_permit:
            self._hand_over(now, [ticket])
        else:
            self._at(ends, lambda at: self._time_out(at, ticket))

    def _time_out(self, now: float, ticket: Ticket) -> None:
        if ticket.state is TicketState.WAITING or (ticket.state is TicketState.GONE and ticket.admitted == 0.0):
            self._results[ticket].error = self._results[ticket].error or DeadlineExceeded("")
            self._hand_over(now, self.scheduler.leave(ticket, now))

    # --- the server --------------------------------------------------------------------------------------------------

    def _hand_over(self, now: float, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            self._results[ticket].queued_s = now - ticket.arrived
            self._inside.append(ticket)
        while self._inside and self._busy < self._server.slots(now):
            self._busy += 1
            self._begin(now, self._inside.popleft())

    def _stop(self, ticket: Ticket) -> None:
        """Stop a preempted request."""
        self.run.preempted += 1
        if ticket in self._inside:
            self._inside.remove(ticket)
        else:
            self._busy -= 1

    def _begin(self, now: float, ticket: Ticket) -> None:
        turn = ticket.preempted
        first = now + self._draw(self._server.prefill_s(now), self._server.prefill_cv)
        self._at(first, lambda at: turn == ticket.preempted and self._first(at, ticket))
        ends = first + self._draw(self._server.decode_s(now), self._server.decode_cv)
        self._at(ends, lambda at: turn == ticket.preempted and self._end(at, ticket))

    def _first(self, now: float, ticket: Ticket) -> None:
        self._results[ticket].first_s = now - ticket.arrived
        self._hand_over(now, self.scheduler.first_token(ticket, now, now - ticket.admitted))

    def _end(self, now: float, ticket: Ticket) -> None:
        self._busy -= 1
        self._results[ticket].done_s = now - ticket.arrived
        self._hand_over(now, self.scheduler.leave(ticket, now, ticket.tokens))

    # --- the loop ----------------------------------------------------------------------------------------------------

    def _sample(self, now: float) -> None:
        self._at(now + 0.05, self._sample)
        self.run.limits.append((now, self.scheduler.limit))
        self.run.inside.append((now, len(self._inside)))
        self.run.waiting.append((now, self.scheduler.waiting))
        self.run.saturated.append((now, self.scheduler.saturated(now)))

    def _draw(self, mean: float, cv: float) -> float:
        """Draw from a lognormal distribution."""
        sigma = math.sqrt(math.log(1.0 + cv * cv))
        return mean * math.exp(self._chance.gauss(-sigma * sigma / 2.0, sigma))

    def _at(self, when: float, event: Callable[[float], object]) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))


class TwoGateways(Simulation):
    """Two schedulers before one server, each with half of the callers. `shared`: each may have half of the permits;
    otherwise neither knows of the other."""

    def __init__(
        self,
        server: Server,
        callers: list[Callers],
        settings: AdmissionSettings,
        seed: int = 1,
        *,
        shared: bool = False,
    ) -> None:
        super().__init__(server, callers, settings, seed)
        self._schedulers = (self.scheduler, AdmissionScheduler(settings, 0.0))
        for scheduler in self._schedulers if shared else ():
            scheduler.set_upper_bound(settings.permits // 2, 0.0)
        self._scheduler_of: dict[Ticket, AdmissionScheduler] = {}

    def _arrive(self, now: float, callers: Callers) -> None:
        self.scheduler = self._schedulers[self._chance.random() < 0.5]
        before = len(self._results)
        super()._arrive(now, callers)
        if len(self._results) > before:
            self._scheduler_of[next(reversed(self._results))] = self.scheduler

    def _time_out(self, now: float, ticket: Ticket) -> None:
        self.scheduler = self._scheduler_of[ticket]
        super()._time_out(now, ticket)

    def _first(self, now: float, ticket: Ticket) -> None:
        self.scheduler = self._scheduler_of[ticket]
        super()._first(now, ticket)

    def _end(self, now: float, ticket: Ticket) -> None:
        self.scheduler = self._scheduler_of[ticket]
        super()._end(now, ticket)


def settings(
    permits: int, max_queued: int = 64, least: int = 1, objective_s: float = 2.0, **config: float
) -> AdmissionSettings:
    return AdmissionSettings(
        permits=permits,
        max_queued=max_queued,
        min_permits=least,
        ttft_objective_s=objective_s,
        config=AdmissionConfig(**config),
    )
