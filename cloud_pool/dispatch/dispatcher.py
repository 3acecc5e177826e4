"""An ask and its tier's pool → the deltas of exactly one endpoint.

1. no time is left, or none of the endpoints plausibly has a first token in it: DeadlineExceeded, nothing starts
2. a try; where hedging may help, a second one elsewhere once the first is slow
3. a first delta: that endpoint answers, and whatever happens from now on is final
4. an error that another endpoint may not have, tries and budget left: a short pause, and (2) on another endpoint
5. else the error of the last try
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

import anyio

from router.errors import CausewayError, DeadlineExceeded

from ..upstreams.triton.tensors import Delta, InferenceRequest
from .config import DispatchSettings
from .endpoint_attempt import EndpointAttempt
from .first_token_latency import FirstTokenLatency
from .hedge_race import HedgeRace
from .protocols import DispatchCounters, EndpointLease, EndpointSource, NoCounters
from .retry_budget import HedgeBudget, RetryBudget
from .retry_rules import RetryState

PAUSE_S = 0.02
MAX_PAUSE_S = 0.2
_log = logging.getLogger("causeway.cloud.dispatch")


class Dispatcher:
    """One tier's. Owns its retry budget, its hedges' share and its pace. `chance` draws from [0, 1)."""

    def __init__(
        self,
        pool: EndpointSource,
        settings: DispatchSettings | None = None,
        *,
        counts: DispatchCounters | None = None,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
    ) -> None:
        self._settings = settings or DispatchSettings()
        self._pool = pool
        self._counts = counts or NoCounters()
        self._clock = clock
        self._chance = chance
        self._sleep = sleep
        self._budget = RetryBudget(self._settings.retry_budget.share, self._settings.retry_budget.min_retries_per_s)
        self._share = HedgeBudget(self._settings.hedge.max_share)
        self._pace = FirstTokenLatency(self._settings.hedge.after_quantile)

    @property
    def retries_left(self) -> float:
        """Extra tries that the budget allows now."""
        return max(0.0, self._budget.left(self._clock()))

    async def generate(
        self, ask: InferenceRequest, key: bytes = b"", *, hedged: bool = True
    ) -> AsyncGenerator[Delta, None]:
        """The answer, piece by piece, of one endpoint. Raises CausewayError; closing it cancels all work in Triton.

        `key` says which prefix the prompt has, for the pool. `hedged`: whether a second endpoint may be asked when
        the first is slow, which bulk work has no use for.
        """
        self._budget.asked(self._clock())
        self._share.asked()
        won = await self._begun(ask, key, hedged and self._settings.hedge.enabled)
        async with aclosing(won.answer()) as deltas:
            async for delta in deltas:
                yield delta

    async def _begun(self, ask: InferenceRequest, key: bytes, hedged: bool) -> EndpointAttempt:
        """The try that has its first delta. Raises CausewayError: of the last try, or that there could be none."""
        retry_state = RetryState(self._settings.max_attempts)
        lease = self._lease(ask, key, retry_state)  # (1)
        while True:
            errors = await self._round(lease, ask, key, retry_state, hedged)
            if isinstance(errors, EndpointAttempt):
                return errors  # (3)
            elsewhere = await self._elsewhere(errors, ask, key, retry_state)
            if elsewhere is None:
                raise errors[-1]  # (5)
            _log.debug("%s: %s, tried again at %s", ask.request_id, errors[-1].code, elsewhere.endpoint)
            self._counts.retried(errors[-1].code)
            lease = elsewhere

    async def _round(
        self, lease: EndpointLease, ask: InferenceRequest, key: bytes, retry_state: RetryState, hedged: bool
    ) -> EndpointAttempt | list[CausewayError]:
        """(2) The try that has its first delta, or why there is none."""
        first = self._try(lease, ask, retry_state)
        now = self._clock()
        late_s, very_late_s = self._pace.late_s(now), self._pace.very_late_s(now)
        if late_s is None or very_late_s is None or not hedged or self._pool.healthy < 2:
            return await _alone(first)

        def hedge(is_very_late: bool) -> EndpointAttempt | None:
            return self._hedge(ask, key, retry_state, lease, is_very_late)

        race = HedgeRace(first, hedge, late_s, very_late_s)
        try:
            return await race.run() or race.errors
        finally:
            if race.outcome is not None:
                self._counts.hedged(race.outcome)

    def _hedge(
        self, ask: InferenceRequest, key: bytes, retry_state: RetryState, first: EndpointLease, is_very_late: bool
    ) -> EndpointAttempt | None:
        try:
            lease = self._lease(ask, key, retry_state)
        except CausewayError:
            return None
        # Where others wait as well, or have waited, it is no chance that this one does.
        if not (self._share.take(is_very_late or first.is_slow) and self._budget.take(self._clock())):
            lease.close()
            if is_very_late:
                self._counts.hedged("refused")
            return None
        return self._try(lease, ask, retry_state)

    async def _elsewhere(
        self, errors: list[CausewayError], ask: InferenceRequest, key: bytes, retry_state: RetryState
    ) -> EndpointLease | None:
        """(4) Where the ask goes after these errors, once the pause is over; None: nowhere. Raises DeadlineExceeded
        where somebody could take it, but not in the time that is left: no fault of the tier's, nor may it look so."""
        if not retry_state.may_retry(errors) or len(self._pool.endpoints) <= len(retry_state.tried):
            return None
        # All of it is jitter: what failed together must not come back together.
        pause_s = self._chance() * min(MAX_PAUSE_S, PAUSE_S * 2.0 ** (retry_state.tries - 1))
        now = self._clock()
        if now + pause_s >= ask.deadline or not self._budget.take(now):
            return None
        await self._sleep(pause_s)
        try:
            return self._lease(ask, key, retry_state)
        except DeadlineExceeded as late:
            raise late from errors[-1]
        except CausewayError:
            return None

    def _lease(self, ask: InferenceRequest, key: bytes, retry_state: RetryState) -> EndpointLease:
        """On an endpoint that was not tried and that plausibly answers in time. Raises CausewayError."""
        now = self._clock()
        left_s = ask.deadline - now
        if left_s <= 0.0:
            raise DeadlineExceeded("the time for this request is over")
        too_slow: set[str] = set()
        while True:
            try:
                lease = self._pool.lease(key=key, excluding=retry_state.tried | too_slow)
            except CausewayError:
                if too_slow:
                    raise DeadlineExceeded(f"no first token comes in the {left_s:.3f} s that are left") from None
                raise
            if left_s >= self._pace.fastest_s(lease.endpoint, now):
                return lease
            lease.close()
            too_slow.add(lease.endpoint)

    def _try(self, lease: EndpointLease, ask: InferenceRequest, retry_state: RetryState) -> EndpointAttempt:
        retry_state.begin_attempt(lease.endpoint)
        return EndpointAttempt(lease, ask, self._pace, self._clock)


async def _alone(only: EndpointAttempt) -> EndpointAttempt | list[CausewayError]:
    begun = False
    try:
        await only.begin()
        begun = True
        return only
    except CausewayError as error:
        return [error]
    finally:
        if not begun:
            await only.close()
