"""Clients, leaders and followers on two gateways, coming, leaving, failing and dying in any order."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import AsyncExitStack

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from causeway_server.cloud_pool.cache.config import CacheConfig
from causeway_server.router.errors import CloudFailed, Draining
from tests.redis_server import RedisServer
from tests.waiting import until

from .gateways import Client, Clock, Gateway, ask, gateway

pytestmark = pytest.mark.redis
LEASE_S = 0.06
TEXT = "one two three"
WHICH = st.sampled_from([0, 1])
_runs = itertools.count()
ASK = st.tuples(st.just("ask"), WHICH, st.sampled_from([True, True, False]))
WORD = st.tuples(st.just("word"), WHICH, st.integers(1, 2))
ACTIONS = st.one_of(
    ASK,
    ASK,
    ASK,
    WORD,
    WORD,
    st.tuples(st.just("break"), WHICH, st.sampled_from([None, 0, 1, 2, 3])),
    st.tuples(st.just("leave"), st.integers(0, 9), st.none()),
    st.tuples(st.just("clock"), st.none(), st.sampled_from([0.01, LEASE_S, 3 * LEASE_S])),
)


class Bed:
    """Two gateways and all their clients."""

    def __init__(self, gateways: tuple[Gateway, Gateway], clock: Clock) -> None:
        self.gateways = gateways
        self.clock = clock
        self.clients: list[tuple[int, Client]] = []
        self.left: set[int] = set()
        self.died = False

    async def act(self, what: str, which: int | None, how: object) -> None:
        if what == "ask" and not (which == 0 and self.died):
            assert which is not None
            self.clients.append((which, self.gateways[which].ask(ask(stream=bool(how)))))
        elif what == "word":
            assert which is not None
            assert isinstance(how, int)
            self.gateways[which].script.permit(how)
        elif what == "break":
            assert which is not None
            script = self.gateways[which].script
            script.error = None if how is None else CloudFailed("boom", phase="stream")
            script.breaks_after = how if isinstance(how, int) else 3
        elif what == "leave" and which is not None and which < len(self.clients):
            self.left.add(which)
            await self.clients[which][1].leave()
        elif what == "clock":
            assert isinstance(how, float)
            self.clock.move(how)
        elif what == "die":
            self.died = True
            self.gateways[0].die()
        # One iteration of the gateways or several: how far they get is part of the experiment.
        await asyncio.sleep(0.003)

    async def settle(self) -> None:
        """Let everything go on until every client has ended."""
        for each in self.gateways:
            each.script.error = None
            each.script.permit(1000)
        for number, (_, client) in enumerate(self.clients):
            while number not in self.left and not client.done:
                self.clock.move(LEASE_S)
                await asyncio.sleep(0.01)

    def check(self) -> None:
        for number, (which, client) in enumerate(self.clients):
            gone = number in self.left or (self.died and which == 0)
            assert TEXT.startswith(client.text), "a client has words that were never generated, or one twice"
            if client.error is None and not gone:
                assert client.text == TEXT
                assert [chunk.finish_reason for chunk in client.got if chunk.finish_reason] == ["stop"]
                assert sum(chunk.usage is not None for chunk in client.got) == 1
            expected = (CloudFailed, Draining) if gone else CloudFailed
            assert client.error is None or isinstance(client.error, expected)
            if isinstance(client.error, CloudFailed):
                assert client.reply.billable, "an error of another request's attempt"
        runs = sum(len(each.script.requests) for each in self.gateways)
        assert sum(client.reply.billable for _, client in self.clients) == runs, "each run is billed once"


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(actions=st.lists(ACTIONS, min_size=12, max_size=30), dies_at=st.sampled_from([99, 99, 99, *range(5, 25, 2)]))
def test_any_order(redis_server: RedisServer, actions: list[tuple[str, int | None, object]], dies_at: int) -> None:
    """Each client that stays gets the whole answer once, or the error of an attempt billed to it; each attempt
    is billed once; nothing is left behind."""

    async def run() -> None:
        clock = Clock()
        config = CacheConfig(enabled=True, key_prefix=f"o{next(_runs)}", redis_timeout_s=5.0, lease_s=LEASE_S)
        async with AsyncExitStack() as stack:
            made = [await stack.enter_async_context(gateway(redis_server.url, config, clock)) for _ in range(2)]
            bed = Bed((made[0], made[1]), clock)
            for at, action in enumerate(actions):
                if at == dies_at:
                    await bed.act("die", 0, None)
                await bed.act(*action)
            await bed.settle()
            bed.check()
            await until(
                lambda: not any(each.caching_service.generations or each.caching_service.following for each in made)
            )

    asyncio.run(asyncio.wait_for(run(), 60.0))
