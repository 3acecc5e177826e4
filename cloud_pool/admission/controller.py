"""A tier's door: the turnstile decides, and here its waiters wait."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

import anyio

from router.errors import CausewayError, DeadlineExceeded, QueueFull, Shed

from .config import AdmissionSettings
from .scheduler import AdmissionScheduler, Reason
from .ticket import Priority, Ticket, TicketState

LOST = 0.1
"""Of the time to a first token, lost by this process: more, and it is not the tier's time."""
_JITTER = 0.25


class Preempted(Exception):
    """The place went to somebody else before the first token: nothing was seen of the work that held it."""


class Permit:
    """A place in the tier, from `Admission.place` until that ends.

    Until its first token it may be taken back: work up to there is done `held`, and where that raises Preempted, done
    again once the place was `regained`.
    """

    def __init__(self, admission: AdmissionController, ticket: Ticket) -> None:
        self._admission = admission
        self._ticket = ticket
        self._stop: Callable[[], None] | None = None
        self._again: asyncio.Future[QueueFull | None] | None = None
        self._lost_s = admission.lost_s()
        self.used_tokens: float | None = None

    @property
    def waited_s(self) -> float:
        """In the queue."""
        return self._ticket.admitted - self._ticket.arrived

    def first_token(self, seconds_in_triton: float) -> None:
        """From handing to Triton until its first token; a retry's time counts from its own handing over."""
        lost_s = self._admission.lost_s() - self._lost_s
        self._admission.first_token(self._ticket, seconds_in_triton, told=lost_s <= LOST * seconds_in_triton)

    def failed(self) -> None:
        """No first token, because the tier would take no more, or was not in time. A broken endpoint is not meant."""
        self._admission.failed(self._ticket)

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Cancels what is done within when the place is taken back, and raises Preempted."""
        if self._again is not None:
            raise Preempted
        self._lost_s = self._admission.lost_s()
        try:
            # No cancel scope of anyio's: generators that begin in here have theirs, and outlive this one.
            async with asyncio.timeout(None) as timeout:
                self._stop = lambda: timeout.reschedule(asyncio.get_running_loop().time())
                yield
        except TimeoutError:
            if self._again is None:
                raise
        finally:
            self._stop = None
        if self._again is not None:
            raise Preempted

    async def reacquired(self) -> None:
        """Waits for a place once more, at the head of its tenant's queue. Raises as `Admission.place` does."""
        while self._again is not None:
            future, self._again = self._again, None
            await self._admission.wait(self._ticket, future)

    def revoke(self, again: asyncio.Future[QueueFull | None]) -> None:
        """`again` is done when it has a place once more."""
        self._again = again
        if self._stop is not None:
            self._stop()
            self._stop = None

    def used(self, tokens: float) -> None:
        """Prompt and answer, as it turned out."""
        self.used_tokens = tokens


class AdmissionController:
    """The places of one tier, and who waits for one. `Admission(places, queue)` has a limit that stays what it is."""

    def __init__(
        self,
        places: int,
        queue: int,
        settings: AdmissionSettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
        waited: Callable[[Priority, float], None] = lambda priority, seconds: None,
        shed: Callable[[Priority, Reason], None] = lambda priority, reason: None,
        preempted: Callable[[Priority], None] = lambda priority: None,
        lost_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`waited` is told how long each who goes in has waited, s; `shed` who is turned away, and why; `preempted` who
        has to give its place back. `lost_s`: lag.Lag's."""
        self.lost_s = lost_s
        self._clock = clock
        self._chance = chance
        self._waited = waited
        self._turnstile = AdmissionScheduler(settings or AdmissionSettings(places=places, queue=queue), clock(), shed)
        self._preempted = preempted
        self._futures: dict[Ticket, asyncio.Future[QueueFull | None]] = {}
        self._places: dict[Ticket, Permit] = {}

    @property
    def running(self) -> int:
        return self._turnstile.running

    @property
    def waiting(self) -> int:
        return self._turnstile.waiting

    def waiting_of(self, priority: Priority) -> int:
        return self._turnstile.waiting_of(priority)

    @property
    def limit(self) -> int:
        """As many may be in Triton now."""
        return self._turnstile.limit

    @property
    def held_s(self) -> float | None:
        """How long a place is held, of late; None where nothing is known yet."""
        return self._turnstile.held_s

    @property
    def saturated(self) -> bool:
        """A queue stands, and not only of bulk: nobody gets in within the time that is meant for waiting."""
        return self._turnstile.saturated(self._clock())

    def queue_seconds(self, priority: Priority) -> float:
        """How long a newcomer of this priority would wait, as far as is known; 0 while places are free."""
        return self._turnstile.seconds(priority)

    @asynccontextmanager
    async def place(
        self,
        priority: Priority,
        left_s: float,
        tenant: str = "",
        weight: float = 1.0,
        tokens: float = 1.0,
        *,
        preemptible: bool = False,
    ) -> AsyncIterator[Permit]:
        """`tokens` is what the request may cost, prompt and answer together; `gives_back`: what is done up to the first
        token is done `held`. Before anything costly is done for it.

        Raises at once DeadlineExceeded, Shed (503) or QueueFull (429), these two with when to come back; and while it
        waits DeadlineExceeded, or QueueFull when it had to give way.
        """
        now = self._clock()
        ticket = Ticket(priority, tenant, weight, tokens, now, now + left_s, preemptible)
        place = self._places[ticket] = Permit(self, ticket)
        try:
            await self._enter(ticket)
            self._waited(priority, ticket.admitted - ticket.arrived)
            yield place
        finally:
            del self._places[ticket]
            self._futures.pop(ticket, None)
            self._wake(self._turnstile.leave(ticket, self._clock(), place.used_tokens))

    def first_token(self, ticket: Ticket, seconds: float, *, told: bool = True) -> None:
        """`told` False: the time is not the tier's."""
        self._wake(self._turnstile.first_token(ticket, self._clock(), seconds if told else None))

    def failed(self, ticket: Ticket) -> None:
        self._turnstile.failed(ticket, self._clock())

    def bound(self, places: int) -> None:
        """No more than so many may be in Triton from now on; a limit that stays what it is stays."""
        self._wake(self._turnstile.bound(places, self._clock()))

    @property
    def demand(self) -> int:
        """Requests that are here."""
        return self.running + self.waiting

    async def wait(self, ticket: Ticket, future: asyncio.Future[QueueFull | None]) -> None:
        """Until it has a place. Raises as `place` does, which passes on what was given in the very moment that the
        waiter left."""
        try:
            with anyio.fail_after(ticket.deadline - self._clock()):
                refusal = await future
        except TimeoutError:
            raise DeadlineExceeded("the time for this request ended in the queue") from None
        if refusal is not None:
            self._jitter(refusal)
            raise refusal

    async def _enter(self, ticket: Ticket) -> None:
        """Raises as `place` does."""
        try:
            moved = self._turnstile.arrive(ticket, ticket.arrived)
        except (QueueFull, Shed) as error:
            self._jitter(error)
            raise
        for each in moved:
            self._move(each)
        if ticket.state is TicketState.WAITING:
            await self.wait(ticket, self._future(ticket))

    def _move(self, ticket: Ticket) -> None:
        """It had to make room."""
        if ticket.state is TicketState.WAITING:
            self._preempted(ticket.priority)
            self._places[ticket].revoke(self._future(ticket))
        else:
            self._tell(ticket, self._turnstile.full(ticket.priority))

    def _future(self, ticket: Ticket) -> asyncio.Future[QueueFull | None]:
        future = self._futures[ticket] = asyncio.get_running_loop().create_future()
        return future

    def _wake(self, entered: Iterable[Ticket]) -> None:
        for ticket in entered:
            self._tell(ticket, None)

    def _tell(self, ticket: Ticket, refusal: QueueFull | None) -> None:
        future = self._futures.pop(ticket)
        if not future.done():  # Else it is leaving at this moment, and passes its place on itself.
            future.set_result(refusal)

    def _jitter(self, error: CausewayError) -> None:
        """Later than honest, never sooner: who is refused together does not come back together."""
        if error.retry_after_s is not None:
            error.retry_after_s *= 1.0 + _JITTER * self._chance()
