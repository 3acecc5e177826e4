"""Two real Tritons, and each class of error as the real server gives it. Only the model is a stand-in, which does what
the prompt tells it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence, Sized
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import anyio
import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from causeway_server.cloud_pool.dispatch.discovery import EndpointAddress, TierEndpoints
from causeway_server.cloud_pool.dispatch.dispatcher import Dispatcher, EndpointLease, EndpointSource, RetryBudget
from causeway_server.cloud_pool.dispatch.endpoint_selection import NO_PROMPT, Prompt
from causeway_server.cloud_pool.dispatch.pool import Pool as RealPool
from causeway_server.cloud_pool.upstreams.inference import InferenceRequest
from causeway_server.cloud_pool.upstreams.triton.client import TritonAccess, TritonClient
from causeway_server.cloud_pool.upstreams.triton.messages import SamplingParameters
from causeway_server.cloud_pool.upstreams.triton.model_control import HEADER, default_key_file, read_key
from causeway_server.router.errors import (
    CausewayError,
    CloudFailed,
    CloudRejected,
    CloudUnreachable,
    DeadlineExceeded,
    QueueFull,
    StreamBroken,
)
from tests.cloud_pool.conftest import triton_environment
from tests.waiting import until

from . import scripted
from .replica import Replica

__all__ = ["triton_environment"]

pytestmark = [pytest.mark.triton]

PATIENCE_S = 60.0
FOREVER: dict[str, object] = {"wait": None}
_marks = itertools.count()


class Bed:
    """A dispatcher over endpoints a, b, c …, one for each list of scripts."""

    def __init__(self, replicas: list[Replica], pool: EndpointSource, budget: RetryBudget) -> None:
        self.replicas = replicas
        self.counted = scripted.Counted()
        self.dispatch = Dispatcher(pool, retry_budget=budget, retried=self.counted.retried)
        self.mark = ""

    def request(
        self, left_s: float = PATIENCE_S, model: str = "obedient", **orders: Sequence[Mapping[str, object]]
    ) -> InferenceRequest:
        """Build a request that tells each replica, by name, what to do."""
        self.mark = f"m{next(_marks)}"
        prompt = json.dumps({"mark": self.mark, **orders})
        parameters = SamplingParameters(max_tokens=5)
        return InferenceRequest(model=model, prompt=prompt, parameters=parameters, deadline=time.monotonic() + left_s)

    async def text(self, request: InferenceRequest) -> str:
        async with aclosing(self.dispatch.generate(request)) as deltas:
            return "".join([one.text async for one in deltas])

    async def noted(self, *lines: list[str]) -> None:
        """What the journal says about the request with this mark."""
        await until(lambda: [replica.noted(self.mark) for replica in self.replicas] == list(lines))


async def answers(triton: TritonClient) -> None:
    """Wait until the replica's models answer again."""
    with anyio.fail_after(PATIENCE_S):
        while True:
            with contextlib.suppress(CausewayError):
                return await triton.probe("obedient")
            await asyncio.sleep(0.05)


class InOrder:
    """The product's pool, but the first endpoint is always preferred."""

    def __init__(self, pool: RealPool) -> None:
        self._pool = pool
        self._addresses = [one.address for one in pool.endpoints]

    @property
    def endpoints(self) -> Sized:
        return self._pool.endpoints

    def lease(self, *, prompt: Prompt = NO_PROMPT, excluding: Collection[str] = ()) -> EndpointLease:
        others = set(self._addresses)
        for address in self._addresses:
            if address not in excluding:
                with contextlib.suppress(CausewayError):
                    return self._pool.lease(prompt=prompt, excluding=others - {address})
        return self._pool.lease(prompt=prompt, excluding=excluding)


@asynccontextmanager
async def pool_of(replicas: list[Replica]) -> AsyncIterator[tuple[RealPool, list[TritonClient]]]:
    """The product's pool, watched. Asserts that every lease is closed at the end."""
    tritons: dict[str, TritonClient] = {}
    try:
        async with anyio.create_task_group() as tasks:
            key_file = default_key_file()
            tritons |= {
                one.address: TritonClient(one.address, tasks, access=TritonAccess(key_file=key_file))
                for one in replicas
            }
            addresses = [EndpointAddress("127.0.0.1", replica.port) for replica in replicas]
            pool = RealPool(TierEndpoints("tier", "obedient", tuple(addresses)), tritons.__getitem__)
            for triton in tritons.values():
                await answers(triton)
            tasks.start_soon(pool.watch)
            yield pool, list(tritons.values())
            tasks.cancel_scope.cancel()
    finally:
        for triton in tritons.values():
            await triton.close()
    assert [one.outstanding for one in pool.endpoints] == [0] * len(replicas)


@asynccontextmanager
async def bed(replicas: list[Replica]) -> AsyncIterator[Bed]:
    async with pool_of(replicas) as (pool, _):
        with anyio.fail_after(PATIENCE_S):
            yield Bed(replicas, InOrder(pool), RetryBudget(share=1.0))


@pytest.fixture(scope="module")
def replicas(triton_environment: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Replica]]:
    folder = tmp_path_factory.mktemp("replicas")
    started: list[Replica] = []
    try:
        started += [Replica(name, folder) for name in ("a", "b")]
        for replica in started:
            replica.process.ready()
        yield started
    finally:
        for replica in started:
            replica.process.stop()


# --- each class of error ----------------------------------------------------------------------------------------------


async def test_a_refused_connection_is_retried(replicas: list[Replica]) -> None:
    async with bed(replicas) as it:
        it.replicas[0].server.kill()
        assert await it.text(it.request()) == "b"
        assert it.counted.retries == ["cloud_unreachable"]
        await it.noted([], ["began", "ended"])


async def test_a_server_killed_before_the_first_token_is_retried_once(replicas: list[Replica]) -> None:
    async with bed(replicas) as it:
        task = asyncio.ensure_future(it.text(it.request(a=[FOREVER])))
        await it.noted(["began"], [])
        it.replicas[0].server.kill()
        assert await task == "b"
        assert it.counted.retries == ["cloud_unreachable"]


async def test_a_server_killed_after_the_first_token_is_an_error(replicas: list[Replica]) -> None:
    async with bed(replicas) as it:
        async with aclosing(it.dispatch.generate(it.request(a=[{"say": "start"}, FOREVER]))) as deltas:
            assert (await anext(deltas)).text == "start"
            it.replicas[0].server.kill()
            with pytest.raises(StreamBroken):
                await anext(deltas)
        await it.noted(["began"], [])


DEAD = {"engine_unavailable", "stream_broken", "cloud_unreachable"}
"""What a dead stub gives: its own error, the pool's for its silence, or that it took its whole server along (one that
is killed while it holds the lock of the shared memory)."""


async def test_a_dead_models_request_is_retried(replicas: list[Replica]) -> None:
    """Triton calls the model ready."""
    async with bed(replicas) as it:
        it.replicas[0].stub("obedient").kill()
        assert await it.text(it.request()) == "b"
        assert [code in DEAD for code in it.counted.retries] == [True]


async def test_a_model_that_dies_at_work_is_detected_and_retried(replicas: list[Replica]) -> None:
    """Triton would leave the call hanging."""
    async with bed(replicas) as it:
        task = asyncio.ensure_future(it.text(it.request(a=[FOREVER])))
        await it.noted(["began"], [])
        it.replicas[0].stub("obedient").kill()
        assert await task == "b"
        assert [code in DEAD for code in it.counted.retries] == [True]


async def test_an_unloaded_model_is_retried(replicas: list[Replica]) -> None:
    """NOT_FOUND is this server's state and not the request's fault."""
    async with bed(replicas) as it, grpc.aio.insecure_channel(it.replicas[0].address) as channel:
        control = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        metadata = ((HEADER, read_key(default_key_file())),)
        unload = service_pb2.RepositoryModelUnloadRequest(model_name="obedient")
        await control.RepositoryModelUnload(unload, metadata=metadata)
        try:
            assert await it.text(it.request()) == "b"
        finally:
            load = service_pb2.RepositoryModelLoadRequest(model_name="obedient")
            await control.RepositoryModelLoad(load, metadata=metadata)
        assert it.counted.retries == ["engine_unavailable"]


async def test_a_full_engine_queue_is_retried(replicas: list[Replica]) -> None:
    full: dict[str, object] = {"fail": ["UNAVAILABLE", "queue_full: 64 wait"]}
    async with bed(replicas) as it:
        assert await it.text(it.request(a=[full])) == "b"
        assert it.counted.retries == ["queue_full"]
        with pytest.raises(QueueFull):
            await it.text(it.request(a=[full], b=[full]))


async def test_a_model_exception_is_retried_once(replicas: list[Replica]) -> None:
    async with bed(replicas) as it:
        assert await it.text(it.request(a=[{"raise": "oops"}])) == "b"
        assert it.counted.retries == ["cloud_failed"]
        with pytest.raises(CloudFailed):
            await it.text(it.request(a=[{"raise": "oops"}], b=[{"raise": "oops"}]))
        await it.noted(["began", "ended"], ["began", "ended"])


async def test_an_invalid_tensor_is_not_retried(replicas: list[Replica]) -> None:
    async with bed(replicas) as it:
        with pytest.raises(CloudRejected):
            await it.text(it.request(model="picky"))
        assert it.counted.retries == []


async def test_the_deadline_stops_the_server_and_is_not_retried(replicas: list[Replica]) -> None:
    async with bed(replicas) as it:
        with pytest.raises(DeadlineExceeded):
            await it.text(it.request(0.3, a=[FOREVER]))
        assert it.counted.retries == []
        await it.noted(["began", "cancelled", "ended"], [])


async def test_a_retry_carries_the_remaining_deadline(replicas: list[Replica]) -> None:
    async with bed(replicas) as it:
        with pytest.raises(DeadlineExceeded):
            await it.text(it.request(1.0, a=[{"wait": 0.3}, {"fail": ["INTERNAL", "late"]}], b=[FOREVER]))
        assert it.counted.retries == ["cloud_failed"]
        await it.noted(["began", "ended"], ["began", "cancelled", "ended"])


# --- leaving ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("say", [[], [{"say": "a"}]], ids=["before", "after"])
async def test_a_caller_who_leaves_stops_the_server(replicas: list[Replica], say: list[dict[str, object]]) -> None:
    """Before the first delta, and after it."""
    async with bed(replicas) as it:
        task = asyncio.ensure_future(it.text(it.request(a=[*say, FOREVER])))
        await it.noted(["began"], [])
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        await it.noted(["began", "cancelled", "ended"], [])


# --- amplification ----------------------------------------------------------------------------------------------------


class Alternating(scripted.Pool):
    """A pool that never learns: every other request starts at the first endpoint, dead or not."""

    def __init__(self, *endpoints: scripted.Addressed) -> None:
        super().__init__(*endpoints)
        self._turn = itertools.count()

    def lease(self, *, prompt: Prompt = NO_PROMPT, excluding: Collection[str] = ()) -> scripted.Lease:
        if not excluding and next(self._turn) % 2:
            return super().lease(excluding={self.endpoints[0].address})
        return super().lease(excluding=excluding)


RATE = 25.0
SECONDS = 6.0


@pytest.mark.slow
@pytest.mark.parametrize("learning", [True, False], ids=["the pool", "a pool that never learns"])
async def test_amplification_with_one_of_two_servers_dead(
    replicas: list[Replica], triton_environment: Path, tmp_path: Path, learning: bool
) -> None:
    """At most 1.2 attempts a request. With the product's pool every request is answered; with one that never learns, as
    many as the budget pays for."""
    dying = Replica("dying", tmp_path, restart=False)
    try:
        dying.process.ready()
        both = [dying, replicas[1]]
        async with pool_of(both) as (pool, tritons):
            it = Bed(both, pool if learning else Alternating(*tritons), RetryBudget())
            outcomes = await _load(it, dying)
    finally:
        dying.process.kill()
    requests = len(outcomes)
    tries = requests + len(it.counted.retries)
    print(f"{requests} requests, {tries} tries, {outcomes.count('ok')} answered: {tries / requests:.3f}")
    assert tries / requests <= 1.2
    begun = outcomes.count("stream_broken")  # at the server that was killed, before their end
    assert outcomes.count("ok") + begun == requests if learning else outcomes.count("ok") < requests


async def _load(it: Bed, dying: Replica) -> list[str]:
    """Return one outcome a request: ok or an error's code. After the first second `dying` is killed."""
    outcomes: list[str] = []

    async def one() -> None:
        try:
            text = await it.text(it.request(dying=[{"wait": 0.05}, {"say": "x"}], b=[{"wait": 0.05}, {"say": "x"}]))
            outcomes.append("ok" if text == "x" else text)
        except (CloudUnreachable, StreamBroken) as error:
            outcomes.append(error.code)

    async with anyio.create_task_group() as tasks:
        for number in range(int(RATE * SECONDS)):
            if number == RATE:
                await asyncio.to_thread(dying.process.kill)
            tasks.start_soon(one)
            await asyncio.sleep(1.0 / RATE)
    return outcomes
