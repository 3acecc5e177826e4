"""A tier's admission: the scheduler decides, the waiters wait here, and Prometheus counts the outcomes."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Gauge

from causeway_server.router.errors import CausewayError, DeadlineExceeded, QueueFull, Shed
from causeway_server.router.jobs.submission import RANK
from causeway_server.router.serving.metrics import Counter, Histogram, described
from causeway_server.router.types import Priority

from .permits import AdmissionSettings, TierCapacity
from .scheduler import AdmissionScheduler, Reason
from .waiting import Ticket, TicketState

_LOST_SHARE = 0.1
"""Share of a TTFT that delays of this process may cause; beyond it, the time does not describe the tier."""
_JITTER = 0.25
_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TIER = ("tier",)
_LABELS = ("tier", "priority")


class Preempted(Exception):
    """The permit went to a more urgent request before the first token; the caller has seen nothing of this answer."""


class Permit:
    """The right to run one sequence in a tier, until `release` or the end of the context of `AdmissionController`.

    It may be revoked until the first token. Work up to there runs in the permit's own context, which cancels it and
    raises Preempted when that happens; then await `granted` and repeat the work. The context is a class, not a
    generator with a timeout or a cancel scope: generators that begin in there outlive it, and every sequence enters it.
    """

    def __init__(self, admission: AdmissionController, ticket: Ticket) -> None:
        self._admission = admission
        self._ticket = ticket
        self._task: asyncio.Task[Any] | None = None  # what works while the permit is held
        self._cancelling = 0  # times that the task was cancelled before
        self._stopped = False
        self.grant: asyncio.Future[QueueFull | None] | None = None  # until it is granted, or granted again
        self._is_reported = False
        self._lost_s = admission.lost_s()
        self.on_revoked: Callable[[], object] | None = None
        """Called when the permit is revoked from work that is not a task's."""
        self.used_tokens: float | None = None
        """Tokens that the sequence used, prompt and answer together; None: not reported."""

    def wait_for(self, grant: asyncio.Future[QueueFull | None]) -> None:
        """Stop the work in progress, and make `granted` wait until `grant` is done."""
        self.grant = grant
        if self._task is not None and not self._stopped:
            self._stopped = True
            self._task.cancel()
        elif self.on_revoked is not None:
            self.on_revoked()

    async def granted(self) -> None:
        """Wait until the permit is granted; after Preempted, at the head again. Raises as `acquire` does."""
        while self.grant is not None:
            grant, self.grant = self.grant, None
            await self._admission.wait(self._ticket, grant)
            self._lost_s = self._admission.lost_s()
        self.report_wait()

    def report_wait(self) -> None:
        """Report how long it took until the permit was first granted, once."""
        if not self._is_reported:
            self._is_reported = True
            self._admission.report_wait(self._ticket)

    def release(self) -> None:
        """Give the permit back: its sequence has ended."""
        self._admission.release(self._ticket)

    def first_token(self, seconds_in_triton: float) -> None:
        """Report the first token. The time counts from the last hand-over to Triton."""
        is_reliable = self._admission.lost_s() - self._lost_s <= _LOST_SHARE * seconds_in_triton
        self._admission.first_token(self._ticket, seconds_in_triton if is_reliable else None)

    def failed(self) -> None:
        """Report that the tier refused, or its first token was late; faults of a single endpoint do not count."""
        self._admission.failed(self._ticket)

    def __enter__(self) -> None:
        if self.grant is not None:
            raise Preempted
        self._lost_s, self._stopped = self._admission.lost_s(), False
        task = self._task = asyncio.current_task()
        assert task is not None
        self._cancelling = task.cancelling()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        task, self._task = self._task, None
        assert task is not None
        if self._stopped and task.uncancel() > self._cancelling:
            return  # the task itself is cancelled, too
        if self.grant is not None and (kind is None or (self._stopped and kind is asyncio.CancelledError)):
            raise Preempted from error


class Acquired:
    """The permits of a request, for as long as the context is open, or from `enter` to `leave`."""

    __slots__ = ("_admission", "_tickets")

    def __init__(self, admission: AdmissionController, tickets: Sequence[Ticket]) -> None:
        self._admission = admission
        self._tickets = tickets

    async def __aenter__(self) -> Sequence[Permit]:
        return self.enter()

    async def __aexit__(self, *_: object) -> None:
        self.leave()

    def enter(self) -> Sequence[Permit]:
        """Return the permits, which may be granted later."""
        try:
            return self._admission.arrive(self._tickets)
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        for ticket in reversed(self._tickets):  # those that wait first: a sibling's permit is for others
            self._admission.release(ticket)


class AdmissionController:
    """The permits of one tier, and the requests that wait for them."""

    def __init__(
        self,
        permits: int,
        max_queued: int,
        settings: AdmissionSettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: Callable[[], float] = random.random,
        metrics: AdmissionMetrics | None = None,
        tier: str = "",
        lost_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Create the controller. Without `settings` the concurrency limit is fixed at `permits`.

        `lost_s` returns the total delay caused by this process (`observability.metrics.EventLoopLag`).
        """
        self.lost_s = lost_s
        self.wants_more = False  # a worker's: more work waits than that in here, as far as its last claim of jobs tells
        self._clock = clock
        self._rng = rng
        self._metrics = metrics or AdmissionMetrics(CollectorRegistry())
        self._tier = tier
        settings = settings or AdmissionSettings(permits=permits, max_queued=max_queued)
        self.scheduler = AdmissionScheduler(settings, clock(), partial(self._metrics.count_shed, tier))
        self._metrics.watch(tier, self.scheduler)
        self._futures: dict[Ticket, asyncio.Future[QueueFull | None]] = {}
        self._permits: dict[Ticket, Permit] = {}

    @property
    def limit(self) -> int:
        """Number of sequences that may be in Triton now."""
        return self.scheduler.limit

    @property
    def demand(self) -> int:
        """Number of sequences that wait or run at endpoints that accept requests."""
        return self.scheduler.demand

    def acquire(
        self,
        sequences: int,
        priority: Priority,
        left_s: float,
        tenant: str = "",
        weight: float = 1.0,
        tokens: float = 1.0,
        *,
        preemptible: bool = False,
    ) -> Acquired:
        """Ask for the permits of a request, and hold them. Call it before any costly work for the request.

        The context provides the permits before they are granted. The caller starts a sequence when its `Permit.granted`
        returns, and calls `Permit.release` at its end, so that the next one may start. They are granted in order.

        Args:
            left_s: Time left until the request's deadline.
            tokens: Maximum number of tokens of a sequence, prompt and answer together.
            preemptible: Whether work up to the first token runs in the context of its `Permit`.

        Raises:
            Shed: 429 with `retry_after_s`, at once.
            QueueFull: 429 with `retry_after_s`, at once or when it is displaced from the queue.
            DeadlineExceeded: The deadline passed, at once or during the wait.
        """
        now = self._clock()
        tickets = [Ticket(priority, tenant, weight, tokens, now, now + left_s, preemptible) for _ in range(sequences)]
        for ticket in tickets if sequences > 1 else ():
            ticket.siblings = tickets
        return Acquired(self, tickets)

    def arrive(self, tickets: Sequence[Ticket]) -> Sequence[Permit]:
        """Register a request by its tickets, and return their permits. Raises like `acquire`."""
        permits = []
        for ticket in tickets:
            permit = self._permits[ticket] = Permit(self, ticket)
            permits.append(permit)
        self._arrive(tickets[0])
        return permits

    def first_token(self, ticket: Ticket, seconds: float | None) -> None:
        """Record a first token; `seconds` None: the measured time does not describe the tier."""
        self._wake(self.scheduler.first_token(ticket, self._clock(), seconds))

    def failed(self, ticket: Ticket) -> None:
        self.scheduler.failed(ticket, self._clock())

    def set_upper_bound(self, permits: int, capacity: TierCapacity | None = None) -> None:
        """Bound the concurrency limit; `capacity`: the new capacity, if it has changed."""
        self._wake(self.scheduler.set_upper_bound(permits, self._clock(), capacity))

    def report_wait(self, ticket: Ticket) -> None:
        """Report how long the ticket's request waited, by its first sequence."""
        if ticket.is_first:
            self._metrics.observe_wait(self._tier, ticket.priority, ticket.admitted - ticket.arrived)

    def release(self, ticket: Ticket) -> None:
        """Give the ticket's permit back, or its place in the queue; a second call does nothing."""
        permit = self._permits.pop(ticket, None)
        if permit is not None:
            self._futures.pop(ticket, None)
            self._wake(self.scheduler.leave(ticket, self._clock(), permit.used_tokens))

    async def wait(self, ticket: Ticket, future: asyncio.Future[QueueFull | None]) -> None:
        """Wait for a permit. One that is granted as its waiter leaves is passed on. Raises like `acquire`."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(ticket.deadline - self._clock(), _expire, future)
        try:
            queue_full = await future
        finally:
            timer.cancel()
        if queue_full is not None:
            self._add_jitter(queue_full)
            raise queue_full

    def _arrive(self, ticket: Ticket) -> None:
        """Register the request of this ticket. Raises like `acquire`."""
        try:
            moved = self.scheduler.arrive(ticket, ticket.arrived)
        except (QueueFull, Shed) as error:
            self._add_jitter(error)
            raise
        for each in moved:
            self._make_room(each)
        for each in ticket.siblings or (ticket,):
            if each.state is TicketState.WAITING:
                self._permits[each].wait_for(self._future(each))

    def _make_room(self, ticket: Ticket) -> None:
        """Revoke the permit of a preempted ticket, or reject one that was displaced from the queue."""
        if ticket.state is TicketState.WAITING:
            self._metrics.count_preempted(self._tier, ticket.priority)
            self._permits[ticket].wait_for(self._future(ticket))
        else:
            self._resolve(ticket, self.scheduler.queue_full_error(ticket.priority))

    def _future(self, ticket: Ticket) -> asyncio.Future[QueueFull | None]:
        future = self._futures[ticket] = asyncio.get_running_loop().create_future()
        return future

    def _wake(self, admitted: Iterable[Ticket]) -> None:
        for ticket in admitted:
            self._resolve(ticket, None)

    def _resolve(self, ticket: Ticket, queue_full: QueueFull | None) -> None:
        future = self._futures.pop(ticket)
        if not future.done():  # Otherwise its waiter is leaving at this moment, and passes the permit on itself.
            future.set_result(queue_full)

    def _add_jitter(self, error: CausewayError) -> None:
        """Lengthen `retry_after_s` at random, so that requests rejected together do not return together."""
        if error.retry_after_s is not None:
            error.retry_after_s *= 1.0 + _JITTER * self._rng()


def _expire(grant: asyncio.Future[QueueFull | None]) -> None:
    if not grant.done():
        grant.set_exception(DeadlineExceeded("The request's deadline passed while it waited in the queue."))


class AdmissionMetrics:
    """Metrics of admission, for all tiers."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter, histogram = partial(Counter, registry), partial(Histogram, registry)
        self._queue = histogram("causeway_gateway_queue_seconds", _LABELS, _SECONDS)
        self._shed = counter("causeway_gateway_requests_shed", (*_LABELS, "reason"))
        self._preemptions = counter("causeway_gateway_preemptions", _LABELS)
        self._limit = described(Gauge, registry, "causeway_gateway_concurrency_limit", _TIER)
        self._running = described(Gauge, registry, "causeway_gateway_requests_running", _TIER)
        self._queued = described(Gauge, registry, "causeway_gateway_requests_queued", _LABELS)

    def watch(self, tier: str, scheduler: AdmissionScheduler) -> None:
        """Read a tier's scheduler at each scrape."""
        self._limit.labels(tier).set_function(lambda: scheduler.limit)
        self._running.labels(tier).set_function(lambda: scheduler.running)
        for priority in RANK:
            self._queued.labels(tier, priority).set_function(partial(scheduler.waiting_of, priority))

    def observe_wait(self, tier: str, priority: Priority, seconds: float) -> None:
        """Record the waiting time of an admitted request."""
        self._queue.observe((tier, priority), seconds)

    def count_shed(self, tier: str, priority: Priority, reason: Reason) -> None:
        self._shed.add((tier, priority, reason))

    def count_preempted(self, tier: str, priority: Priority) -> None:
        self._preemptions.add((tier, priority))
