"""Leases in every order of events, on a real Redis with a moved clock: one question, three gateways.

The model is the expected state of Redis: the lease's holder and expiry, the last announced interest, and the stored
answer. Gateways act late and in any order: a leader that was taken for dead goes on, a follower dies.
"""

from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from prometheus_client import CollectorRegistry

from causeway_server.cloud_pool.cache.config import CacheConfig
from causeway_server.cloud_pool.cache.entry_codec import EntryCodec
from causeway_server.cloud_pool.cache.store import AnswerStore, CacheMetrics, GenerationKey, LeaderLease, RemoteLeader
from causeway_server.cloud_pool.core.request_context import AnswerHead, CachedAnswer
from causeway_server.router.types import Chunk, Request
from tests.redis_server import RedisServer

from .gateways import Clock

LEASE_S, TTL_S, STALE_S = 3.0, 10.0, 20.0
NAMES = st.sampled_from(["a", "b", "c"])
KEY = GenerationKey("0" * 32, "standard")
ASKED = Request(kind="chat", model="big")
_machines = itertools.count()


class Leases(RuleBasedStateMachine):
    url = ""

    @initialize()
    def start(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.clock = Clock()
        config = CacheConfig(
            enabled=True,
            key_prefix=f"m{next(_machines)}",
            lease_s=LEASE_S,
            ttl_s=TTL_S,
            stale_if_error_s=STALE_S,
            redis_timeout_s=5.0,
        )
        self.codec = EntryCodec(b"", compress_above_bytes=1000, max_entry_bytes=1000)
        self.metrics = CacheMetrics(CollectorRegistry())
        self.stores = {
            name: AnswerStore(self.url, config, self.codec, self.metrics, gateway_id=name, now_ms=self.clock)
            for name in "abc"
        }
        self.leases: dict[str, LeaderLease] = {}  # that each gateway believes to hold
        self.leaders: dict[str, RemoteLeader] = {}  # that each gateway follows
        self.holder: tuple[str, LeaderLease] | None = None  # in the model
        self.until = 0.0
        self.wanted_until = 0.0
        self.kept: tuple[str, float] | None = None  # text, when
        self.fences: list[int] = []
        self.answers = itertools.count()

    def teardown(self) -> None:
        async def close() -> None:
            for store in self.stores.values():
                await store.close()

        self.loop.run_until_complete(close())
        self.loop.close()

    @property
    def now(self) -> float:
        return self.clock.now / 1000

    @property
    def is_led(self) -> bool:
        return self.holder is not None and self.until > self.now

    def holds(self, name: str) -> bool:
        """In the model: an expired lease that was not taken over is still its holder's."""
        return self.holder is not None and self.holder == (name, self.leases.get(name))

    # --- events ------------------------------------------------------------------------------------------------------

    @rule(name=NAMES)
    def join_or_lead(self, name: str) -> None:
        """A fresh answer, else follow the leader, else lead."""
        found = self.loop.run_until_complete(self.stores[name].join_or_lead(KEY, may_follow=True))
        if self.kept is not None and self.now - self.kept[1] < TTL_S:
            assert isinstance(found, CachedAnswer)
            assert found.chunks[0].text == self.kept[0]
            assert abs(found.age_s - (self.now - self.kept[1])) < 0.01
        elif self.is_led and self.holder is not None and self.holder[0] != name:
            assert found == RemoteLeader(KEY, self.holder[1].fence)
            self.leaders[name] = found
            self.wanted_until = self.now + 2 * LEASE_S
        else:
            assert isinstance(found, LeaderLease)
            assert found.took_over == (self.holder is not None)
            self.fences.append(int(found.fence.partition("-")[0]))
            self.leases[name], self.holder = found, (name, found)
            self.until, self.wanted_until = self.now + LEASE_S, 0.0

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), publish=st.booleans())
    def renew(self, data: st.DataObject, publish: bool) -> None:
        """Only the holder renews, and learns whether a follower waits."""
        name = data.draw(st.sampled_from(sorted(self.leases)))
        lease = self.leases[name]
        store = self.stores[name]
        interest = self.loop.run_until_complete(store.publish(lease, b"piece") if publish else store.renew(lease))
        if self.holds(name):
            assert interest == (self.wanted_until > self.now)
            self.until = self.now + LEASE_S
        else:
            assert interest is None

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), worth_keeping=st.booleans())
    def end(self, data: st.DataObject, worth_keeping: bool) -> None:
        """Only the holder's answer is stored."""
        name = data.draw(st.sampled_from(sorted(self.leases)))
        lease = self.leases.pop(name)
        text = f"answer {next(self.answers)}"
        value = (
            self.codec.pack(KEY.cache_key, AnswerHead(), ASKED, [Chunk(text=text, finish_reason="stop")])
            if worth_keeping
            else b""
        )
        assert value is not None
        held = self.holder == (name, lease)
        assert self.loop.run_until_complete(self.stores[name].finish(lease, value, b"", "")) == held
        if held:
            self.holder = None
            self.kept = (text, self.now) if worth_keeping else self.kept

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        """A failed leader releases its own lease and no other."""
        name = data.draw(st.sampled_from(sorted(self.leases)))
        lease = self.leases.pop(name)
        self.loop.run_until_complete(self.stores[name].release(lease))
        self.holder = None if self.holder == (name, lease) else self.holder

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release_if_unwanted(self, data: st.DataObject) -> None:
        """A leader without clients stays exactly while another gateway waits."""
        name = data.draw(st.sampled_from(sorted(self.leases)))
        lease = self.leases[name]
        held = self.holds(name)
        stays = self.loop.run_until_complete(self.stores[name].release_if_unwanted(lease))
        assert stays == (held and self.wanted_until > self.now)
        if not stays:
            del self.leases[name]
            self.holder = None if held else self.holder

    @precondition(lambda self: self.leaders)
    @rule(data=st.data())
    def announce_interest(self, data: st.DataObject) -> None:
        """A follower waits exactly while its leader holds an unexpired lease."""
        name = data.draw(st.sampled_from(sorted(self.leaders)))
        leader = self.leaders[name]
        waits = self.loop.run_until_complete(self.stores[name].announce_interest(leader))
        assert waits == (self.is_led and self.holder is not None and self.holder[1].fence == leader.fence)
        if waits:
            self.wanted_until = self.now + 2 * LEASE_S
        else:
            del self.leaders[name]

    @rule(name=NAMES)
    def find_stale(self, name: str) -> None:
        """A stored answer is available until its time is over."""
        found = self.loop.run_until_complete(self.stores[name].find_stale(KEY.cache_key, TTL_S + STALE_S))
        if self.kept is not None and self.now - self.kept[1] < TTL_S + STALE_S:
            assert found is not None
            assert found.chunks[0].text == self.kept[0]
        else:
            assert found is None

    @rule(name=NAMES)
    def die(self, name: str) -> None:
        """kill -9: the gateway forgets; Redis does not."""
        self.leases.pop(name, None)
        self.leaders.pop(name, None)

    @rule(seconds=st.sampled_from([0.1, 1.0, LEASE_S, 2 * LEASE_S, TTL_S, STALE_S]))
    def wait(self, seconds: float) -> None:
        self.clock.move(seconds)

    # --- invariants --------------------------------------------------------------------------------------------------

    @invariant()
    def fences_only_grow(self) -> None:
        fences = getattr(self, "fences", [])
        assert fences == sorted(set(fences))


@pytest.mark.redis
def test_leases(redis_server: RedisServer) -> None:
    """In every order of these events Redis agrees with the model: one leader at a time, only its answer is
    stored, and no follower waits for a dead one."""
    Leases.url = redis_server.url
    run_state_machine_as_test(
        Leases,
        settings=settings(
            max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
