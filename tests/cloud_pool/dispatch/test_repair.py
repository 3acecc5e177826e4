"""A model whose process died: detected by its silence, its streams ended, and reloaded. Over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from functools import partial

import anyio
import grpc
import pytest

from causeway_server.cloud_pool.dispatch.config import LoadBalancingConfig
from causeway_server.cloud_pool.dispatch.discovery import TierEndpoints, parse_endpoint_address
from causeway_server.cloud_pool.dispatch.pool import Pool
from causeway_server.cloud_pool.upstreams.inference import Delta
from causeway_server.cloud_pool.upstreams.triton.client import TritonClient
from causeway_server.cloud_pool.upstreams.triton.errors import StubProcessDied
from causeway_server.router.errors import CausewayError, EngineUnavailable, StreamBroken
from tests.cloud_pool.upstreams.test_triton_client import (
    FakeTriton,
    Reply,
    Script,
    bed,
    collect,
    hang_after_one,
    infer_request,
    two_pieces,
)
from tests.waiting import until

pytestmark = pytest.mark.slow

QUICK = LoadBalancingConfig(silent_before_probe_s=0.2, probe_timeout_s=0.3, base_ejection_s=0.05, hung_after_s=0.6)


@asynccontextmanager
async def watched(script: Script) -> AsyncIterator[tuple[FakeTriton, Pool]]:
    async with bed(script) as (fake, triton), anyio.create_task_group() as tasks:
        pool = Pool(TierEndpoints("t", "m", (parse_endpoint_address("t:1"),)), lambda _: triton, settings=QUICK)
        tasks.start_soon(pool.watch)
        yield fake, pool
        tasks.cancel_scope.cancel()


async def leased(pool: Pool) -> list[Delta]:
    """Run one call as the service does."""
    with closing(pool.lease()) as lease:
        try:
            return await collect(lease.upstream, infer_request())
        except CausewayError as error:
            lease.failed(error)
            raise


def dies_after(calls: int) -> Script:
    """The first `calls` calls hang after one piece, as those of a dead stub; later ones get the stub's error."""
    seen = 0

    async def script(request: object, context: grpc.aio.ServicerContext) -> AsyncIterator[Reply]:
        nonlocal seen
        seen += 1
        if seen > calls:
            await context.abort(grpc.StatusCode.INTERNAL, "Stub process 'm_0_0' is not healthy.")
        async for reply in hang_after_one(request, context):
            yield reply

    return script


async def test_a_dead_models_streams_are_ended_and_it_is_reloaded_once() -> None:
    async with watched(dies_after(2)) as (fake, pool):
        results = await asyncio.gather(leased(pool), leased(pool), return_exceptions=True)
        assert [type(result) for result in results] == [StreamBroken, StreamBroken]
        await until(lambda: len(fake.control) == 2)
        assert fake.control == ["unload", "load"]
        assert pool.healthy == 0
        fake.script = two_pieces
        await until(lambda: pool.healthy == 1)
        assert "".join(delta.text for delta in await leased(pool)) == "ab"


async def test_a_call_without_a_token_is_retryable_after_the_models_death() -> None:
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
        begun = asyncio.ensure_future(collect(triton, infer_request()))
        await until(lambda: triton.last_received_at("m") > 0.0)
        silent = asyncio.ensure_future(collect(triton, infer_request()))
        await until(lambda: len(fake.requests) == 2)
        with pytest.raises(EngineUnavailable):
            await collect(triton, infer_request())
        results = await asyncio.gather(begun, silent, return_exceptions=True)
        assert [type(result) for result in results] == [StreamBroken, StubProcessDied]


async def test_a_hung_models_streams_are_ended_before_their_deadlines() -> None:
    async with watched(hang_after_one) as (fake, pool):
        fake.script = two_pieces
        await leased(pool)
        fake.script = hang_after_one
        stuck = asyncio.ensure_future(leased(pool))
        await until(lambda: len(fake.requests) == 2)

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
async def test_a_failed_reload_is_repeated_a_bounded_number_of_times(faults: int, loads: int) -> None:
    async with bed(dies_after(0)) as (fake, triton):
        fake.load_faults = faults
        with pytest.raises(EngineUnavailable):
            await collect(triton, infer_request())
        await until(lambda: fake.control == ["unload", *["load"] * loads])
        with pytest.raises(EngineUnavailable):
            await collect(triton, infer_request())


async def test_without_model_control_calls_fail_and_nothing_blocks() -> None:
    async with bed(dies_after(0)) as (fake, triton):
        fake.may_control = False
        for _ in range(3):
            with pytest.raises(EngineUnavailable):
                await collect(triton, infer_request())
        assert fake.control == []


def is_repaired(triton: TritonClient) -> bool:
    return not triton.models_in_repair


async def test_several_gateways_reload_a_dead_model_once() -> None:
    async with bed(dies_after(0)) as (fake, _), anyio.create_task_group() as tasks:
        fake.loading.clear()
        reloaded: list[str] = []
        first = TritonClient(fake.address, tasks, pauses_s=(0.01, 0.01), rng=lambda: 0.0)
        others = [
            TritonClient(fake.address, tasks, reloaded=reloaded.append, rng=partial(float, late)) for late in (0.5, 1.0)
        ]
        for triton in (first, *others):
            with pytest.raises(EngineUnavailable):
                await collect(triton, infer_request())
        await until(lambda: fake.index_reads >= 4)
        assert fake.control == ["unload", "load"]
        fake.script = two_pieces
        fake.loading.set()
        for triton in (first, *others):
            await until(partial(is_repaired, triton))
            assert "".join(delta.text for delta in await collect(triton, infer_request())) == "ab"
        assert fake.control == ["unload", "load"]
        assert reloaded == []
        for triton in (first, *others):
            await triton.close()


async def test_a_reloaded_model_is_not_unloaded_by_a_late_report() -> None:
    async with bed(dies_after(0)) as (fake, triton):
        with pytest.raises(EngineUnavailable):
            await collect(triton, infer_request())
        fake.script = two_pieces
        await until(partial(is_repaired, triton))
        assert fake.control == []
        assert "".join(delta.text for delta in await collect(triton, infer_request())) == "ab"


async def test_an_abandoned_reload_is_taken_over() -> None:
    now = 1000.0
    async with bed(dies_after(0)) as (fake, _), anyio.create_task_group() as tasks:
        fake.state = "UNAVAILABLE"
        triton = TritonClient(fake.address, tasks, rng=lambda: 0.0, clock=lambda: now)
        triton.repair("m")
        await until(lambda: fake.index_reads >= 2)
        assert fake.control == []
        now += 60.0
        await until(lambda: fake.control == ["unload", "load"])
        await triton.close()


async def test_a_client_that_is_closed_during_a_reload_fails_nothing_else() -> None:
    """The reload's call is cancelled, and its task ends without an error."""
    async with bed(dies_after(0)) as (fake, _), anyio.create_task_group() as tasks:
        fake.loading.clear()
        triton = TritonClient(fake.address, tasks, rng=lambda: 0.0)
        triton.repair("m")
        await until(lambda: fake.control == ["unload", "load"])
        await triton.close()
        fake.loading.set()
