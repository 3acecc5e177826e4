"""Endpoints that play a script for each call, a pool that returns them in order, and a clock that tests set."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Protocol

import anyio

from causeway_server.cloud_pool.dispatch.dispatcher import Dispatcher, InferenceBackend, RetryBudget
from causeway_server.cloud_pool.dispatch.endpoint_selection import NO_PROMPT, Prompt
from causeway_server.cloud_pool.upstreams.inference import Delta, InferenceRequest
from causeway_server.cloud_pool.upstreams.triton.messages import SamplingParameters
from causeway_server.router.errors import CausewayError, CloudUnreachable

PATIENCE_S = 60.0
LEFT_S = 90.0

Step = str | float | int | Exception | asyncio.Event
"""A piece of text; seconds that pass; turns of the loop; an error; something to wait for."""
QUICK_S = 0.005
"""A budget that stands in no test's way."""


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []
        self.sleeping = asyncio.Event()
        self.held: asyncio.Event | None = None

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        """Return at once, unless held."""
        self.slept.append(seconds)
        self.now += seconds
        self.sleeping.set()
        if self.held is not None:
            await self.held.wait()


class Endpoint:
    """Plays its scripts call by call; the last one is repeated."""

    def __init__(self, address: str, clock: Clock, *scripts: Sequence[Step]) -> None:
        self.address = address
        self.running = 0
        self._clock = clock
        self.play(*scripts)

    def play(self, *scripts: Sequence[Step]) -> None:
        """Replace the scripts and forget all calls."""
        self._scripts = scripts
        self.requests: list[InferenceRequest] = []
        self.cancelled = 0
        self.began = asyncio.Event()

    async def generate(self, request: InferenceRequest) -> AsyncGenerator[Delta, None]:
        script = self._scripts[min(len(self.requests), len(self._scripts) - 1)]
        self.requests.append(request)
        self.running += 1
        self.began.set()
        try:
            for step in script:
                match step:
                    case str():
                        yield delta(step)
                    case float():
                        self._clock.now += step
                    case int():
                        for _ in range(step):
                            await asyncio.sleep(0)
                    case asyncio.Event():
                        await step.wait()
                    case Exception():
                        raise step
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise
        finally:
            self.running -= 1


class Addressed(InferenceBackend, Protocol):
    address: str


class Lease:
    def __init__(self, pool: Pool, triton: Addressed) -> None:
        self.endpoint = triton.address
        self.upstream = triton
        self.reports: list[str] = []
        self._pool = pool
        pool.open.append(self)
        pool.leases.append(self)

    def first_token(self, seconds: float) -> None:
        self.reports.append("first_token")

    def succeeded(self) -> None:
        self.reports.append("succeeded")

    def failed(self, error: CausewayError) -> None:
        self.reports.append(error.code)

    def close(self) -> None:
        self._pool.open.remove(self)


class Pool:
    """Returns the first endpoint that is not excluded; none is ever ejected."""

    def __init__(self, *endpoints: Addressed) -> None:
        self.endpoints = endpoints
        self.leases: list[Lease] = []
        self.open: list[Lease] = []

    def lease(self, *, prompt: Prompt = NO_PROMPT, excluding: Collection[str] = ()) -> Lease:
        for endpoint in self.endpoints:
            if endpoint.address not in excluding:
                return Lease(self, endpoint)
        raise CloudUnreachable("no endpoint can take the request", phase="connect")

    @property
    def last_reports(self) -> list[tuple[str, str]]:
        """The last report of each lease, in order; "" for none."""
        return [(lease.endpoint, lease.reports[-1] if lease.reports else "") for lease in self.leases]


class Counted:
    def __init__(self) -> None:
        self.retries: list[str] = []

    def retried(self, code: str) -> None:
        self.retries.append(code)


class Bed:
    """A dispatcher over endpoints a, b, c …, one for each list of scripts."""

    def __init__(self, *scripts: Sequence[Sequence[Step]], budget: RetryBudget | None = None) -> None:
        self.clock = Clock()
        self.endpoints = [
            Endpoint(name, self.clock, *played) for name, played in zip("abcdefgh", scripts, strict=False)
        ]
        self.pool = Pool(*self.endpoints)
        self.counted = Counted()
        self.dispatch = Dispatcher(
            self.pool,
            retry_budget=budget or RetryBudget(share=1.0),
            retried=self.counted.retried,
            clock=self.clock,
            rng=lambda: 1.0,
            sleep=self.clock.sleep,
        )

    def request(self, left_s: float = LEFT_S) -> InferenceRequest:
        return InferenceRequest(
            model="m", prompt="p", parameters=SamplingParameters(), deadline=self.clock.now + left_s
        )

    async def text(self, left_s: float = LEFT_S) -> str:
        async with aclosing(self.dispatch.generate(self.request(left_s))) as deltas:
            return "".join([one.text async for one in deltas])

    @property
    def calls(self) -> str:
        """One letter for each call, by endpoint: "aab" is two to a and one to b."""
        return "".join(endpoint.address * len(endpoint.requests) for endpoint in self.endpoints)

    def assert_clean(self) -> None:
        """Assert that no call runs, no lease is open and no task is left."""
        assert [endpoint.running for endpoint in self.endpoints] == [0] * len(self.endpoints)
        assert self.pool.open == []
        assert asyncio.all_tasks() == {asyncio.current_task()}


@asynccontextmanager
async def bed(*scripts: Sequence[Sequence[Step]], budget: RetryBudget | None = None) -> AsyncIterator[Bed]:
    made = Bed(*scripts, budget=budget)
    with anyio.fail_after(PATIENCE_S):
        yield made
    made.assert_clean()


def delta(text: str) -> Delta:
    return Delta(text, None, 1)
