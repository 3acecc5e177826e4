"""Engines whose model gets other weights: an answer in progress ends with the old one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from causeway_server.edge_node.backends.engine.engines import EnginePool
from causeway_server.router.errors import EngineUnavailable
from causeway_server.router.policy.compiled import Policy, parse_policy

from ..scripted import ScriptedEngine
from .fleet import POLICY

POLL_S = 0.01
LOOKS_S = 20 * POLL_S
"""Longer than the looks after which an engine without jobs is closed."""


class Pool:
    """A pool whose models have weights that the test changes; `made` are its engines, oldest first."""

    def __init__(self) -> None:
        self.weights = "1"
        self.made: list[ScriptedEngine] = []
        self.pool = EnginePool(self._make, lambda _: self.weights, POLL_S)

    def _make(self, model: str) -> ScriptedEngine:
        engine = ScriptedEngine(model)
        engine.state = "idle"
        self.made.append(engine)
        return engine

    async def settle(self, engine: ScriptedEngine, state: str) -> None:
        async with asyncio.timeout(30.0):
            while engine.state != state:  # noqa: ASYNC110 -- a scripted engine has no events
                await asyncio.sleep(POLL_S)


def policy(model: str = "m-small") -> Policy:
    return parse_policy(POLICY.format(number=1, model=model))


@asynccontextmanager
async def started() -> AsyncIterator[Pool]:
    one = Pool()
    one.pool.use(policy())
    async with anyio.create_task_group() as tasks:
        one.pool.start(tasks)
        await one.settle(one.made[0], "ready")
        yield one
        tasks.cancel_scope.cancel()
    await one.pool.close()


async def test_the_same_weights_keep_their_engine() -> None:
    async with started() as pool:
        pool.pool.use(policy())
        assert len(pool.made) == 1
        assert not pool.pool.is_changed("m-small")


async def test_weights_that_were_loaded_beside_take_over_at_once() -> None:
    async with started() as pool:
        pool.made[0].running = 1
        pool.weights = "2"
        await pool.pool.load_beside("m-small", deadline=0.0)
        pool.pool.use(policy())
        old, new = pool.made
        new.restarts = 7
        assert dict(pool.pool.restarts()) == {"m-small": 7}
        await asyncio.sleep(LOOKS_S)
        assert not old.closed
        old.running = 0
        await pool.settle(old, "closed")
        assert new.state == "ready"


async def test_where_memory_is_short_the_new_engine_starts_after_the_old_one_is_gone() -> None:
    async with started() as pool:
        pool.made[0].running = 1
        pool.weights = "2"
        pool.pool.use(policy())
        old, new = pool.made
        await asyncio.sleep(LOOKS_S)
        assert (old.closed, new.state) == (False, "idle")
        old.running = 0
        await pool.settle(new, "ready")
        assert old.closed


async def test_a_model_that_is_no_longer_named_ends_its_answers() -> None:
    async with started() as pool:
        pool.made[0].running = 1
        pool.pool.use(policy("m-other"))
        await pool.settle(pool.made[1], "ready")
        await asyncio.sleep(LOOKS_S)
        assert not pool.made[0].closed
        pool.made[0].running = 0
        await pool.settle(pool.made[0], "closed")


async def test_weights_that_cannot_be_loaded_change_nothing() -> None:
    async with started() as pool:
        pool.weights = "2"
        make = pool.pool

        class Broken(ScriptedEngine):
            async def ready(self, deadline: float) -> None:
                raise EngineUnavailable("a bad file", phase="connect")

        broken = Broken()
        pool.pool = EnginePool(lambda _: broken, lambda _: pool.weights)
        with pytest.raises(EngineUnavailable):
            await pool.pool.load_beside("m-small", deadline=0.0)
        assert broken.closed
        await pool.pool.close()
        pool.pool = make
        assert pool.made[0].state == "ready"


async def test_a_pool_that_closes_leaves_no_engine() -> None:
    async with started() as pool:
        pool.made[0].running = 1
        pool.weights = "2"
        await pool.pool.load_beside("m-small", deadline=0.0)
        pool.pool.use(policy())
        pool.weights = "3"
        await pool.pool.load_beside("m-small", deadline=0.0)
        await pool.pool.close()
        assert [engine.closed for engine in pool.made] == [True, True, True]
