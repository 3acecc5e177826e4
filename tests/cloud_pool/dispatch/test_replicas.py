"""Two real Tritons behind one pool, while one of them is killed, stopped or broken."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import aiohttp
import anyio
import psutil
import pytest

from causeway_server.cloud_pool.dispatch.config import LoadBalancingConfig
from causeway_server.cloud_pool.dispatch.discovery import TierEndpoints, parse_endpoint_address
from causeway_server.cloud_pool.dispatch.dispatcher import Dispatcher
from causeway_server.cloud_pool.dispatch.pool import Pool
from causeway_server.cloud_pool.upstreams.clients import UpstreamClients
from causeway_server.cloud_pool.upstreams.inference import InferenceRequest
from causeway_server.cloud_pool.upstreams.triton.messages import SamplingParameters
from causeway_server.cloud_pool.upstreams.triton.model_control import default_key_file
from causeway_server.router.errors import CausewayError
from tests.waiting import until

from ..conftest import PATIENCE_S, Command
from ..conftest import Pool as Replica
from ..conftest import triton_environment as triton_environment

pytestmark = [pytest.mark.triton, pytest.mark.engine]

MODEL = "assistant-large"
QUICK = LoadBalancingConfig(slowness_decay_s=1.0)


@pytest.fixture(scope="module")
def replicas(triton_environment: Path) -> Iterator[tuple[Replica, Replica]]:
    ports = ("--grpc-port", "0", "--metrics-port", "0", "--threads", "1", "--drain-s", "1")
    commands = [Command("triton", *ports, CAUSEWAY_TRITON_ENV=str(triton_environment)) for _ in range(2)]
    try:
        first, second = (Replica(command) for command in commands)
        yield first, second
    finally:
        for command in commands:
            command.stop_triton()


class Crowd:
    """Callers that send requests without a pause; records endpoints, errors and their times."""

    def __init__(self, pool: Pool, *, deadline_s: float) -> None:
        self.errors: list[str] = []
        self.answers = 0
        self._dispatch = Dispatcher(pool)
        self._deadline_s = deadline_s

    async def run(self) -> None:
        while True:
            request = InferenceRequest(
                model=MODEL,
                prompt="turn on the light",
                parameters=SamplingParameters(max_tokens=4, temperature=0.0),
                deadline=time.monotonic() + self._deadline_s,
            )
            try:
                async with aclosing(self._dispatch.generate(request)) as deltas:
                    async for _ in deltas:
                        pass
                self.answers += 1
            except CausewayError as error:
                self.errors.append(error.code)
                await asyncio.sleep(0.01)


@asynccontextmanager
async def crowd(replicas: tuple[Replica, Replica], *, deadline_s: float = 20.0) -> AsyncIterator[tuple[Pool, Crowd]]:
    async with anyio.create_task_group() as tasks:
        clients = UpstreamClients(tasks, lambda model: None, key_file=default_key_file())
        pool = Pool(
            TierEndpoints("large", MODEL, tuple(parse_endpoint_address(one.grpc) for one in replicas)),
            clients.get,
            settings=QUICK,
        )
        tasks.start_soon(pool.watch)
        callers = Crowd(pool, deadline_s=deadline_s)
        for _ in range(3):
            tasks.start_soon(callers.run)
        with anyio.fail_after(PATIENCE_S):
            await until(lambda: all(one.ttft_s > 0.0 for one in pool.endpoints))
            yield pool, callers
        tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await clients.close()


def phase(pool: Pool, replica: Replica) -> str:
    return next(one.phase for one in pool.endpoints if one.address == replica.grpc)


async def more_answers(callers: Crowd, count: int = 20) -> None:
    enough = callers.answers + count
    await until(lambda: callers.answers >= enough)


async def used_again(pool: Pool, replica: Replica) -> None:
    """Wait until it is active and a request was measured there since."""
    await until(lambda: phase(pool, replica) == "active")
    await until(lambda: next(one.ttft_s for one in pool.endpoints if one.address == replica.grpc) > 0.0)


async def test_a_killed_replicas_requests_are_answered_elsewhere(replicas: tuple[Replica, Replica]) -> None:
    victim, _ = replicas
    async with crowd(replicas) as (pool, callers):
        victim.server.kill()
        await until(lambda: phase(pool, victim) == "ejected")
        await more_answers(callers)
        assert len(callers.errors) <= 3, callers.errors
        assert set(callers.errors) <= {"stream_broken"}
        await asyncio.to_thread(victim.wait_ready)
        await used_again(pool, victim)
        assert len(callers.errors) <= 3, callers.errors


async def test_a_hung_replica_is_ejected_by_missed_deadlines_and_returns(replicas: tuple[Replica, Replica]) -> None:
    """SIGSTOP. `test_health` has the time that it takes."""
    victim, _ = replicas
    async with crowd(replicas, deadline_s=1.5) as (pool, callers):
        process = victim.server
        process.suspend()
        try:
            await until(lambda: phase(pool, victim) == "ejected")
            await more_answers(callers)
        finally:
            process.resume()
        await used_again(pool, victim)
        assert set(callers.errors) <= {"deadline_exceeded", "stream_broken"}


async def test_callers_with_time_left_do_not_notice_a_hung_replica(replicas: tuple[Replica, Replica]) -> None:
    victim, _ = replicas
    async with crowd(replicas) as (pool, callers):
        process = victim.server
        process.suspend()
        try:
            await until(lambda: phase(pool, victim) == "ejected")
            await until(lambda: not any(one.waiting_since for one in pool.endpoints if one.phase == "ejected"))
            await more_answers(callers)
        finally:
            process.resume()
        await used_again(pool, victim)
        assert callers.errors == []


async def test_a_dead_stub_is_replaced_while_the_other_replica_answers(replicas: tuple[Replica, Replica]) -> None:
    """Triton keeps reporting ready: the pool reloads the model, or the launcher restarts the server."""
    victim, _ = replicas
    server, stub = victim.server, victim.stub
    async with crowd(replicas) as (pool, callers):
        stub.kill()
        await until(lambda: phase(pool, victim) == "ejected")
        await more_answers(callers)
        await used_again(pool, victim)
    if not server.is_running() or server.status() == psutil.STATUS_ZOMBIE:
        victim.wait_ready()  # about one time in ten the stub takes its server along
    assert victim.stub.pid != stub.pid
    assert len(callers.errors) <= 3, callers.errors


# --- the gateway as people start it ----------------------------------------------------------------------------------


async def test_sighup_changes_endpoints_without_a_failed_request(
    replicas: tuple[Replica, Replica], tmp_path: Path
) -> None:
    path, addresses = tmp_path / "gateway.yaml", [one.grpc for one in replicas]

    def write(*endpoints: str) -> None:
        path.write_text(f"server: {{port: 0}}\ntiers:\n  - {{name: {MODEL}, endpoints: {list(endpoints)}}}\n")

    write(*addresses)
    command = Command("serve", "--config", str(path))
    ready_line = command.ready()
    url, operator = ready_line["url"], ready_line["operator"]
    statuses = Counter[int]()

    async def request(http: aiohttp.ClientSession) -> None:
        while True:
            async with http.post(f"{url}/completions", json={"model": MODEL, "prompt": "a", "max_tokens": 1}) as reply:
                statuses[reply.status] += 1
                assert reply.status == 200, await reply.text()

    async def seen(http: aiohttp.ClientSession) -> set[str]:
        text = await (await http.get(f"{operator}/metrics")).text()
        lines = [line for line in text.splitlines() if line.startswith("causeway_gateway_endpoint_ttft_seconds{")]
        return {address for address in addresses if any(address in line for line in lines)}

    try:
        with anyio.fail_after(PATIENCE_S):
            async with aiohttp.ClientSession() as http, anyio.create_task_group() as tasks:
                tasks.start_soon(request, http)
                while await seen(http) != set(addresses):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
                ready = await (await http.get(f"{operator}/readyz")).json()
                assert ready["tiers"][MODEL]["endpoints"] == dict.fromkeys(addresses, "")
                write(addresses[1])
                command.process.send_signal(signal.SIGHUP)
                while await seen(http) != {addresses[1]}:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
                path.write_text("tiers: [{name: a, endpoints: [nowhere]}]")
                command.process.send_signal(signal.SIGHUP)
                await until(lambda: any("tiers[0].endpoints[0]" in line for line in command.log))
                assert await seen(http) == {addresses[1]}
                tasks.cancel_scope.cancel()
        assert statuses.keys() == {200}, statuses
        assert command.stop() == 0
    finally:
        command.process.kill()
