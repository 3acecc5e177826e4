"""Gateways on one Redis, without HTTP: caching services over a scripted service."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager

import anyio
import msgspec
from prometheus_client import CollectorRegistry

from causeway_server.cloud_pool.admission import Priority
from causeway_server.cloud_pool.cache.caching_service import Billing, CachingService
from causeway_server.cloud_pool.cache.config import CacheConfig
from causeway_server.cloud_pool.cache.shared_cache import SharedCache
from causeway_server.cloud_pool.core.request_context import AnswerHead, Piece, RequestContext
from causeway_server.cloud_pool.observability.tracing import Trace
from causeway_server.cloud_pool.redis.config import RedisAddress
from causeway_server.cloud_pool.tiers.config import TierConfig
from causeway_server.cloud_pool.tiers.tier import ChatFormat, Tier
from causeway_server.router.errors import CausewayError
from causeway_server.router.types import Chunk, Message, Request, Sampling, Usage
from tests.waiting import until

TIER = Tier(TierConfig(name="large", aliases=("big",)), ChatFormat("template"))
TIERS = {"large": TIER, "big": TIER}
HEAD = AnswerHead((("x-causeway-tier", "large"),))
USAGE = Usage(20, 3)
PATIENCE_S = 60.0
_ids = itertools.count()


def ask(text: str = "wake me up", *, temperature: float | None = 0.0, **changes: object) -> Request:
    plain = Request(
        kind="chat", model="large", messages=(Message("user", text),), sampling=Sampling(temperature=temperature)
    )
    return msgspec.structs.replace(plain, **changes)


class Clock:
    """Redis's clock in ms, moved by the test."""

    def __init__(self) -> None:
        self.now = 1_800_000_000_000

    def __call__(self) -> int:
        return self.now

    def move(self, seconds: float) -> None:
        self.now += round(seconds * 1000)


class Script:
    """A service: sends one word per permit, then ends or fails; records its requests and cancellations."""

    def __init__(self, *words: str, error: CausewayError | None = None, head: AnswerHead = HEAD) -> None:
        self.words = words or ("one ", "two ", "three")
        self.error = error  # of runs that start from now on
        self.breaks_after = len(self.words)  # words, with an error
        self.head = head
        self.permits = asyncio.Semaphore(0)
        self.requests: list[RequestContext] = []
        self.stopped = 0

    def permit(self, count: int = 1) -> None:
        for _ in range(count):
            self.permits.release()

    async def __call__(self, context: RequestContext) -> AsyncGenerator[Piece, None]:
        self.requests.append(context)
        error, breaks_after = self.error, self.breaks_after
        try:
            for at, word in enumerate(self.words):
                await self.permits.acquire()
                if error is not None and at == breaks_after:
                    raise error
                if at == 0:
                    yield self.head
                yield Chunk(text=word, tokens=1)
            await self.permits.acquire()
        except asyncio.CancelledError:
            self.stopped += 1
            raise
        if error is not None:
            raise error
        yield Chunk(finish_reason="stop")
        yield Chunk(usage=USAGE)


class Gateway:
    """A caching service and its metrics. `die` is kill -9: none of its writes reach Redis any more."""

    def __init__(self, url: RedisAddress, config: CacheConfig, script: Script, clock: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        self.script = script
        self.cache = SharedCache(config, url, TIERS, self.registry, now_ms=clock)
        self.caching_service = CachingService(self.cache, script)
        self.started = anyio.Event()
        self._scope = anyio.CancelScope()

    async def live(self) -> None:
        """Run until `stop`."""
        with self._scope:
            async with anyio.create_task_group() as tasks:
                self.caching_service.start(tasks)
                self.started.set()
                await anyio.sleep_forever()

    def stop(self) -> None:
        self._scope.cancel()

    def outcome(self, name: str) -> float:
        return self.registry.get_sample_value("causeway_gateway_cache_requests_total", {"outcome": name}) or 0.0

    def fault(self, name: str) -> float:
        return self.registry.get_sample_value("causeway_gateway_cache_faults_total", {"fault": name}) or 0.0

    def die(self) -> None:
        self.cache.store.suspend(math.inf)
        self.stop()

    def ask(
        self,
        request: Request,
        *,
        tenant: str = "acme",
        left_s: float = 30.0,
        priority: Priority = "standard",
        critical: bool = False,
        trace: Trace | None = None,
    ) -> Client:
        context = RequestContext(
            id=f"call{next(_ids)}",
            request=request,
            tier=TIER,
            deadline=anyio.current_time() + left_s,
            priority=priority,
            tenant=tenant,
            critical=critical,
            trace=trace,
        )
        return Client(*self.caching_service.reply(context))


class Client:
    """One client, which reads in a task of its own."""

    def __init__(self, reply: Billing, pieces: AsyncGenerator[Piece, None]) -> None:
        self.reply = reply
        self.headers: dict[str, str] = {}
        self.got: list[Chunk] = []
        self.error: CausewayError | None = None
        self._pieces = pieces
        self._task = asyncio.ensure_future(self._read())

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.got)

    @property
    def usage(self) -> Usage | None:
        return next((chunk.usage for chunk in self.got if chunk.usage), None)

    @property
    def done(self) -> bool:
        return self._task.done()

    async def end(self) -> Client:
        await asyncio.wait_for(self._task, PATIENCE_S)
        return self

    def cancel(self) -> None:
        self._task.cancel()

    async def leave(self) -> None:
        self.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _read(self) -> None:
        try:
            async with aclosing(self._pieces) as pieces:
                async for piece in pieces:
                    if isinstance(piece, AnswerHead):
                        assert not self.got
                        self.headers = dict(piece.headers)
                    else:
                        self.got.append(piece)
        except CausewayError as error:
            self.error = error


async def joined(one: Gateway) -> Client:
    """A client of the streamed answer, which has read its first word."""
    client = one.ask(ask(stream=True))
    await until(lambda: client.text == "one ")
    return client


async def begun(one: Gateway) -> Client:
    """As `joined`, of an answer that this client's gateway begins."""
    one.script.permit(1)
    return await joined(one)


@asynccontextmanager
async def gateway(
    url: RedisAddress, config: CacheConfig, clock: Callable[[], int], script: Script | None = None
) -> AsyncIterator[Gateway]:
    made = Gateway(url, config, script or Script(), clock)
    root = asyncio.ensure_future(made.live())  # a task of its own: fixtures begin and end in different ones
    await made.started.wait()
    try:
        yield made
    finally:
        made.stop()
        await root
        await made.caching_service.close()
