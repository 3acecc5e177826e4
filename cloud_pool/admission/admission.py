"""A tier's door: the turnstile decides, and here its waiters wait."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

import anyio

from router.errors import CausewayError, DeadlineExceeded, QueueFull, Shed

from .settings import Settings
from .ticket import Priority, State, Ticket
from .turnstile import Reason, Turnstile

_JITTER = 0.25


class Place:
    """A place in the tier, from `Admission.place` until that ends. Each of its methods may be called once."""

    def __init__(self, admission: Admission, ticket: Ticket) -> None:
        self._admission = admission
        self._ticket = ticket
        self.used_tokens: float | None = None

    @property
    def waited_s(self) -> float:
        """In the queue."""
        return self._ticket.admitted - self._ticket.arrived

    def first_token(self, seconds_in_triton: float) -> None:
        """From handing to Triton until its first token; a retry's time counts from its own handing over."""
        self._admission.first_token(self._ticket, seconds_in_triton)

    def failed(self) -> None:
        """No first token, because the tier would take no more, or was not in time. A broken endpoint is not meant."""
        self._admission.failed(self._ticket)

    def used(self, tokens: float) -> None:
        """Prompt and answer, as it turned out."""
        self.used_tokens = tokens


class Admission:
    """The places of one tier, and who waits for one. `Admission(places, queue)` has a limit that stays what it is."""

    def __init__(
        self,
        places: int,
        queue: int,
        settings: Settings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
        waited: Callable[[Priority, float], None] = lambda priority, seconds: None,
        shed: Callable[[Priority, Reason], None] = lambda priority, reason: None,
    ) -> None:
        """`waited` is told how long each who goes in has waited, s; `shed` who is turned away, and why."""
        self._clock = clock
        self._chance = chance
        self._waited = waited
        self._turnstile = Turnstile(settings or Settings(places=places, queue=queue), clock(), shed)
        self._futures: dict[Ticket, asyncio.Future[QueueFull | None]] = {}

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
    def saturated(self) -> bool:
        """A queue stands, and not only of bulk: nobody gets in within the time that is meant for waiting."""
        return self._turnstile.saturated(self._clock())

    def queue_seconds(self, priority: Priority) -> float:
        """How long a newcomer of this priority would wait, as far as is known; 0 while places are free."""
        return self._turnstile.seconds(priority)

    @asynccontextmanager
    async def place(
        self, priority: Priority, left_s: float, tenant: str = "", weight: float = 1.0, tokens: float = 1.0
    ) -> AsyncIterator[Place]:
        """`tokens` is what the request may cost, prompt and answer together. Before anything costly is done for it.

        Raises at once DeadlineExceeded, Shed (503) or QueueFull (429), these two with when to come back; and while it
        waits DeadlineExceeded, or QueueFull when it had to give way.
        """
        now = self._clock()
        ticket = Ticket(priority, tenant, weight, tokens, now, now + left_s)
        await self._enter(ticket, left_s)
        self._waited(priority, ticket.admitted - ticket.arrived)
        place = Place(self, ticket)
        try:
            yield place
        finally:
            self._wake(self._turnstile.leave(ticket, self._clock(), place.used_tokens))

    def first_token(self, ticket: Ticket, seconds: float) -> None:
        self._wake(self._turnstile.first_token(ticket, self._clock(), seconds))

    def failed(self, ticket: Ticket) -> None:
        self._turnstile.failed(ticket, self._clock())

    async def _enter(self, ticket: Ticket, left_s: float) -> None:
        """Raises as `place` does. A place that was given in the very moment that the waiter left is passed on."""
        try:
            gave_way = self._turnstile.arrive(ticket, ticket.arrived)
        except (QueueFull, Shed) as error:
            self._jitter(error)
            raise
        if gave_way is not None:
            self._tell(gave_way, self._turnstile.full(gave_way.priority))
        if ticket.state is not State.WAITING:
            return
        future = self._futures[ticket] = asyncio.get_running_loop().create_future()
        try:
            with anyio.fail_after(left_s):
                refusal = await future
        except BaseException as error:
            self._futures.pop(ticket, None)
            self._wake(self._turnstile.leave(ticket, self._clock()))
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded("the time for this request ended in the queue") from None
            raise
        if refusal is not None:
            self._jitter(refusal)
            raise refusal

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
