"""A tier's only endpoint reads a long prompt in silence, and is dead, over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing

import anyio
import pytest

from causeway_server.cloud_pool.dispatch.config import LoadBalancingConfig
from causeway_server.cloud_pool.dispatch.discovery import TierEndpoints, parse_endpoint_address
from causeway_server.cloud_pool.dispatch.endpoint_selection import Prompt
from causeway_server.cloud_pool.dispatch.pool import Pool
from causeway_server.cloud_pool.upstreams.inference import Delta, InferenceRequest
from causeway_server.cloud_pool.upstreams.triton.client import TritonClient
from causeway_server.router.errors import CausewayError, CloudUnreachable, EngineUnavailable, StreamBroken
from tests.cloud_pool.upstreams.test_triton_client import FakeTriton, Reply, Script, bed, infer_request, piece
from tests.ports import free_port
from tests.waiting import until

pytestmark = pytest.mark.slow

QUICK = LoadBalancingConfig(silent_before_probe_s=0.05, probe_timeout_s=0.1, base_ejection_s=0.05, hung_after_s=0.5)
PROMPT = tuple(range(100_000))


class Engine:
    """Answers two pieces, or nothing at all to any call while it reads a prompt. `rest` holds second pieces back."""

    def __init__(self) -> None:
        self.free, self.rest = asyncio.Event(), asyncio.Event()
        self.free.set()
        self.probes = 0

    async def script(self, request: object, context: object) -> AsyncIterator[Reply]:
        is_probe = getattr(request, "id", "") == "probe"
        self.probes += is_probe
        await self.free.wait()
        yield piece("a")
        await (self.free if is_probe else self.rest).wait()
        yield piece("b", "length", final=True)


@asynccontextmanager
async def only_endpoint(script: Script) -> AsyncIterator[tuple[FakeTriton, Pool]]:
    async with bed(script) as (fake, triton), anyio.create_task_group() as tasks:
        pool = Pool(
            TierEndpoints("t", "m", (parse_endpoint_address(triton.address),)), lambda _: triton, settings=QUICK
        )
        tasks.start_soon(pool.watch)
        yield fake, pool
        tasks.cancel_scope.cancel()


async def answered(pool: Pool, request: InferenceRequest, begun: asyncio.Event | None = None) -> str:
    """Run one call as the service does, and return its text."""
    text = ""
    with closing(pool.lease(prompt=Prompt(request.estimated_tokens))) as lease:
        try:
            async for delta in lease.upstream.generate(request):
                if not text:
                    lease.first_token(0.0)
                    (begun or asyncio.Event()).set()
                text += _text(delta)
        except CausewayError as error:
            lease.failed(error)
            raise
        lease.succeeded()
    return text


def _text(delta: Delta) -> str:
    return delta.text


def long_request() -> InferenceRequest:
    short = infer_request()
    return InferenceRequest(model="m", prompt=PROMPT, parameters=short.parameters, deadline=short.deadline)


async def test_a_silent_prefill_ends_no_answer_and_refuses_nobody() -> None:
    """Probes in a row get nothing, for longer than an endpoint may hang: running answers go on, and others wait."""
    engine = Engine()
    async with only_endpoint(engine.script) as (_, pool):
        begun = asyncio.Event()
        running = asyncio.ensure_future(answered(pool, infer_request(), begun))
        await begun.wait()
        engine.free.clear()
        reading = asyncio.ensure_future(answered(pool, long_request()))
        await until(lambda: engine.probes >= 8)
        assert set((await pool.check()).values()) == {""}
        waiting = asyncio.ensure_future(answered(pool, infer_request()))
        await until(lambda: engine.probes >= 12)
        assert pool.healthy == 1
        engine.free.set()
        engine.rest.set()
        assert await asyncio.gather(running, reading, waiting) == ["ab", "ab", "ab"]


async def test_an_only_endpoint_that_hangs_is_found_and_its_answers_end() -> None:
    """Without a prompt to read there is no reason for silence."""
    engine = Engine()
    async with only_endpoint(engine.script) as (_, pool):
        begun = asyncio.Event()
        running = asyncio.ensure_future(answered(pool, infer_request(), begun))
        await begun.wait()
        engine.free.clear()
        with pytest.raises(StreamBroken):
            await running
        assert pool.healthy == 0
        with pytest.raises((CloudUnreachable, EngineUnavailable)):
            pool.lease()
        engine.free.set()
        engine.rest.set()
        await until(lambda: pool.healthy == 1)
        assert await answered(pool, infer_request()) == "ab"


async def test_an_only_endpoint_that_refuses_is_found_at_once() -> None:
    async with anyio.create_task_group() as tasks:
        triton = TritonClient(f"127.0.0.1:{free_port()}", tasks)
        pool = Pool(
            TierEndpoints("t", "m", (parse_endpoint_address(triton.address),)), lambda _: triton, settings=QUICK
        )
        tasks.start_soon(pool.watch)
        with pytest.raises(CloudUnreachable):
            await answered(pool, long_request())
        await until(lambda: pool.healthy == 0)
        tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await triton.close()
