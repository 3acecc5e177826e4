"""A model whose process died: found by its silence, its streams ended, and loaded again. Over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import grpc
import pytest

from cloud_pool.balancing.config import LoadBalancingConfig
from cloud_pool.balancing.discovery import parse_endpoint_address
from cloud_pool.balancing.pool import Pool
from cloud_pool.upstreams.triton.client import TritonClient
from cloud_pool.upstreams.triton.errors import StubProcessDied
from cloud_pool.upstreams.triton.tensors import Delta
from router.errors import CausewayError, EngineUnavailable, StreamBroken

from ..cloud.test_triton_client import FakeTriton, Reply, Script, ask, bed, collect, hang_after_one, two_pieces

QUICK = LoadBalancingConfig(silent_before_probe_s=0.2, probe_timeout_s=0.3, base_ejection_s=0.05, hung_after_s=0.6)


@asynccontextmanager
async def watched(script: Script) -> AsyncIterator[tuple[FakeTriton, Pool]]:
    async with bed(script) as (fake, triton), anyio.create_task_group() as tasks:
        pool = Pool("t", "m", [parse_endpoint_address("t:1")], lambda _: triton, settings=QUICK)
        tasks.start_soon(pool.watch)
        yield fake, pool
        tasks.cancel_scope.cancel()


async def leased(pool: Pool) -> list[Delta]:
    """One call as a service makes it."""
    with pool.lease() as lease:
        try:
            return await collect(lease.triton, ask())
        except CausewayError as error:
            lease.failed(error)
            raise


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def dies_after(calls: int) -> Script:
    """The first `calls` calls hang after a piece, as those of a dead stub do; later ones hear that it is dead."""
    seen = 0

    async def script(request: object, context: grpc.aio.ServicerContext) -> AsyncIterator[Reply]:
        nonlocal seen
        seen += 1
        if seen > calls:
            await context.abort(grpc.StatusCode.INTERNAL, "Stub process 'm_0_0' is not healthy.")
        async for reply in hang_after_one(request, context):
            yield reply

    return script


async def test_streams_of_a_dead_model_are_ended_and_it_is_loaded_again() -> None:
    """Streams that went quiet make the pool ask; the stub's error ends them all, and one repair follows."""
    async with watched(dies_after(2)) as (fake, pool):
        results = await asyncio.gather(leased(pool), leased(pool), return_exceptions=True)
        assert [type(result) for result in results] == [StreamBroken, StreamBroken]
        await until(lambda: len(fake.control) == 2)
        assert fake.control == ["unload", "load"]
        assert pool.healthy == 0
        fake.script = two_pieces
        await until(lambda: pool.healthy == 1)
        assert "".join(delta.texts[0] for delta in await leased(pool)) == "ab"


async def test_a_call_that_brought_nothing_is_not_broken_by_the_death() -> None:
    """Another call hears of the death first: who had an answer begun lost it, who had none may be asked again."""
    calls = 0

    async def script(request: object, context: grpc.aio.ServicerContext) -> AsyncIterator[Reply]:
        nonlocal calls
        calls += 1
        if calls == 1:
            async for reply in hang_after_one(request, context):
                yield reply
        if calls == 2:
            await asyncio.Event().wait()
        await context.abort(grpc.StatusCode.INTERNAL, "Stub process 'm_0_0' is not healthy.")

    async with bed(script) as (fake, triton):
        begun = asyncio.ensure_future(collect(triton, ask()))
        await until(lambda: triton.last_received_at("m") > 0.0)
        silent = asyncio.ensure_future(collect(triton, ask()))
        await until(lambda: len(fake.asked) == 2)
        with pytest.raises(EngineUnavailable):
            await collect(triton, ask())
        results = await asyncio.gather(begun, silent, return_exceptions=True)
        assert [type(result) for result in results] == [StreamBroken, StubProcessDied]


async def test_streams_of_a_hung_model_are_ended() -> None:
    """A model that answers nobody any more is ejected, and who waits for it hears so long before the deadline."""
    async with watched(hang_after_one) as (fake, pool):
        fake.script = two_pieces
        await leased(pool)
        fake.script = hang_after_one
        stuck = asyncio.ensure_future(leased(pool))
        await until(lambda: len(fake.asked) == 2)

        async def silent(request: object, context: object) -> AsyncIterator[Reply]:
            await asyncio.Event().wait()
            yield Reply()

        fake.script = silent
        with pytest.raises(StreamBroken):
            await stuck
        assert pool.healthy == 0
        with pytest.raises(CausewayError):
            pool.lease()
        fake.script = two_pieces
        await until(lambda: pool.healthy == 1)
    assert pool.endpoints[0].outstanding == 0


@pytest.mark.parametrize(("faults", "loads"), [(1, 2), (9, 3)])
async def test_a_model_that_does_not_load_is_tried_again(faults: int, loads: int) -> None:
    """It was unloaded for its repair, so nobody else would load it; there is an end to it, and callers hear at once."""
    async with bed(dies_after(0)) as (fake, triton):
        fake.load_faults = faults
        with pytest.raises(EngineUnavailable):
            await collect(triton, ask())
        await until(lambda: fake.control == ["unload", *["load"] * loads])
        with pytest.raises(EngineUnavailable):
            await collect(triton, ask())


async def test_a_triton_that_may_not_be_controlled_is_asked_again() -> None:
    """Where unload is refused the model stays broken, each request hears so, and nothing is stuck."""
    async with bed(dies_after(0)) as (fake, triton):
        fake.may_control = False
        for _ in range(3):
            with pytest.raises(EngineUnavailable):
                await collect(triton, ask())
        assert fake.control == []


async def test_several_gateways_load_a_dead_model_once() -> None:
    """Each hears that it is dead; the first unloads and loads it, the others see that and wait until it is done."""
    async with bed(dies_after(0)) as (fake, first), anyio.create_task_group() as tasks:
        fake.loading.clear()
        reloaded: list[str] = []
        others = [
            TritonClient(fake.address, tasks, reloaded=reloaded.append, chance=lambda late=late: late)
            for late in (0.5, 1.0)
        ]
        first._chance = lambda: 0.0
        for triton in (first, *others):
            with pytest.raises(EngineUnavailable):
                await collect(triton, ask())
        await until(lambda: fake.looks >= 4)
        assert fake.control == ["unload", "load"]
        fake.script = two_pieces
        fake.loading.set()
        for triton in (first, *others):
            await until(lambda triton=triton: not triton._in_repair)
            assert "".join(delta.texts[0] for delta in await collect(triton, ask())) == "ab"
        assert fake.control == ["unload", "load"]
        assert reloaded == []
        for triton in others:
            await triton.close()


async def test_a_model_that_was_mended_is_left_alone() -> None:
    """A death that is heard of late is the one that somebody has seen to: the model answers, and is not unloaded."""
    async with bed(dies_after(0)) as (fake, triton):
        with pytest.raises(EngineUnavailable):
            await collect(triton, ask())
        fake.script = two_pieces
        await until(lambda: not triton._in_repair)
        assert fake.control == []
        assert "".join(delta.texts[0] for delta in await collect(triton, ask())) == "ab"


async def test_a_repair_that_nobody_ends_is_taken_over() -> None:
    """Whoever unloaded the model died before it was loaded: the next one does not wait for ever."""
    now = 1000.0
    async with bed(dies_after(0)) as (fake, _), anyio.create_task_group() as tasks:
        fake.state = "UNAVAILABLE"
        triton = TritonClient(fake.address, tasks, chance=lambda: 0.0, clock=lambda: now)
        triton._repair("m")
        await until(lambda: fake.looks >= 2)
        assert fake.control == []
        now += 60.0
        await until(lambda: fake.control == ["unload", "load"])
        await triton.close()
