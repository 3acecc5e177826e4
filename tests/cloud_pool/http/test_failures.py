"""What clients get when parts of the cloud are killed; every part is real."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import aiohttp
import anyio
import psutil
import pytest

from causeway_server.cloud_pool.app import build
from causeway_server.cloud_pool.config import Config
from causeway_server.cloud_pool.http.config import ServerConfig
from causeway_server.cloud_pool.tiers.config import TierConfig
from causeway_server.cloud_pool.triton_server.server_process import SHARED_MEMORY
from tests.waiting import until

from ..conftest import PATIENCE_S, Command, Pool
from .test_gateway import LONG, read

pytestmark = [pytest.mark.triton, pytest.mark.engine]

BODY = {"model": "large", "prompt": "a", "max_tokens": 1}


async def answered(http: aiohttp.ClientSession) -> set[str]:
    """Send requests until one is answered; return the error codes on the way."""
    refusals: set[str] = set()
    with anyio.fail_after(PATIENCE_S):
        while True:
            async with http.post("/v1/completions", json=BODY) as reply:
                if reply.status == 200:
                    return refusals
                assert reply.status == 503, await reply.text()
                assert int(reply.headers["retry-after"]) >= 1
                refusals.add((await reply.json())["error"]["code"])
            await asyncio.sleep(0.05)


async def broken_by(http: aiohttp.ClientSession, victim: psutil.Process) -> list[bytes]:
    """Return the events of a stream during which `victim` is killed after the first ones."""
    events: list[bytes] = []
    with anyio.fail_after(PATIENCE_S):
        async with http.post("/v1/chat/completions", json={"model": "large", "stream": True, **LONG}) as reply:
            assert reply.status == 200
            async for line in reply.content:
                if not line.startswith(b"data: "):
                    continue
                events.append(line[6:].rstrip())
                if len(events) == 2:
                    victim.kill()
    return events


def assert_broken(events: list[bytes]) -> None:
    """The stream has a start and ends with an error: no finish reason, and no [DONE]."""
    assert json.loads(events[0])["choices"][0]["delta"]["role"] == "assistant"
    assert json.loads(events[-1])["error"]["code"] == "stream_broken"
    assert not any(b"[DONE]" in event or b'"finish_reason":"' in event for event in events)


async def repaired(
    http: aiohttp.ClientSession, operator: str, pool: Pool, server: psutil.Process, stub: psutil.Process
) -> None:
    """The model answers again from another process.

    Usually the gateway has reloaded it. A stub that is killed while it holds the lock of the shared memory aborts the
    whole server (the Python backend does not catch boost's lock_exception); then the launcher restarts both.
    """
    refusals = await answered(http)
    if server.is_running() and server.status() != psutil.STATUS_ZOMBIE:
        assert refusals <= {"engine_unavailable"}
        text = await (await http.get(f"{operator}/metrics")).text()
        assert 'causeway_gateway_model_reloads_total{model="assistant-large"}' in text
    else:
        assert refusals <= {"engine_unavailable", "cloud_unreachable"}
        pool.wait_ready()
    assert pool.stub.pid != stub.pid


async def test_failed_requests_do_not_crash_triton(http: aiohttp.ClientSession, pool: Pool) -> None:
    """Hundreds of them, alternating with successful ones. With errors as gRPC statuses Triton died of a few dozens."""
    before = pool.server.pid
    for _ in range(500):
        async with http.post("/v1/completions", json={**BODY, "prompt": ""}) as reply:
            assert reply.status == 400, await reply.text()
        async with http.post("/v1/completions", json=BODY) as reply:
            assert reply.status == 200, await reply.text()
    assert pool.server.pid == before


async def test_disconnects_do_not_crash_triton(http: aiohttp.ClientSession, pool: Pool) -> None:
    """Hundreds of them, in the middle of their answers. With cancelled calls Triton died of one in a thousand."""
    before = pool.server.pid
    for _ in range(400):
        async with http.post("/v1/chat/completions", json={"model": "large", "stream": True, **LONG}) as reply:
            async for line in reply.content:
                if line.startswith(b'data: {"id"'):
                    break
    await until(pool.is_idle)
    assert pool.server.pid == before


async def test_triton_killed_mid_stream(http: aiohttp.ClientSession, pool: Pool) -> None:
    """The stream ends with an error; a new server uses the same ports and answers the next request."""
    old, stub = pool.server, pool.stub
    events = await broken_by(http, old)
    assert_broken(events)
    refusals = await answered(http)
    assert refusals <= {"cloud_unreachable", "engine_unavailable"}
    pool.wait_ready()
    assert pool.server.pid != old.pid
    # Nothing is left of the killed server: neither its stub nor its shared memory.
    await until(lambda: not stub.is_running())
    regions = list(SHARED_MEMORY.glob(f"triton_python_backend_shm_region_causeway{pool.command.process.pid}_*"))
    assert len(regions) == 1


async def test_stub_killed_mid_stream(http: aiohttp.ClientSession, operator: str, pool: Pool) -> None:
    """Triton would leave the stream hanging and report the model as ready: the gateway ends it and reloads the
    model."""
    server, stub = pool.server, pool.stub
    events = await broken_by(http, stub)
    assert_broken(events)
    await repaired(http, operator, pool, server, stub)


async def test_stub_killed_while_idle(http: aiohttp.ClientSession, operator: str, pool: Pool) -> None:
    """The first request after the crash gets a 503 and starts the repair."""
    server, stub = pool.server, pool.stub
    stub.kill()
    async with http.post("/v1/completions", json=BODY) as reply:
        assert reply.status == 503
    await repaired(http, operator, pool, server, stub)
    await until(pool.is_idle)


async def test_gateway_starts_without_its_triton() -> None:
    """It reports that it is not ready, and answers 503."""
    config = Config(
        server=ServerConfig(port=0), tiers=(TierConfig(name="large", artifact="assistant-large", triton="127.0.0.1:1"),)
    )
    async with anyio.create_task_group() as tasks:
        app = build(config, tasks)
        await app.start()
        async with aiohttp.ClientSession() as http:
            async with http.post(f"{app.url}/completions", json=BODY) as reply:
                assert (reply.status, (await reply.json())["error"]["code"]) == (503, "cloud_unreachable")
                assert int(reply.headers["retry-after"]) >= 1
            async with http.get(app.url.replace("/v1", "/readyz")) as reply:
                assert reply.status == 503
            async with http.get(app.url.replace("/v1", "/healthz")) as reply:
                assert reply.status == 200
        await app.drain()
        await app.stop()
    await app.close()


async def test_drain_finishes_running_answers_and_refuses_new_requests(pool: Pool, tmp_path: Path) -> None:
    config = tmp_path / "gateway.yaml"
    config.write_text("server: {port: 0, drain_s: 120}")  # a busy machine may need more than the usual 20 s
    command = Command("serve", "--config", str(config), "--triton", pool.grpc)
    url = command.ready()["url"]
    try:
        async with aiohttp.ClientSession(base_url=url.removesuffix("/v1")) as http:
            ask = {"model": "assistant-large", "stream": True, **LONG}
            stream = asyncio.ensure_future(read(http, ask))
            await until(lambda: pool.gauge("running") > 0)
            command.process.send_signal(signal.SIGTERM)
            status = 400
            while status == 400:  # until the signal has arrived: the stream would end beside requests that are served
                async with http.post("/v1/completions", json={}) as reply:
                    status, answer = reply.status, await reply.json()
            assert (status, answer["error"]["code"]) == (503, "draining")
            events = await stream
        assert events[-1] == b"[DONE]"
        assert command.process.wait(timeout=PATIENCE_S) == 0
    finally:
        command.process.kill()


async def test_answers_that_outlast_the_drain_end_with_an_error(pool: Pool, tmp_path: Path) -> None:
    config = tmp_path / "gateway.yaml"
    config.write_text("server: {port: 0, drain_s: 0.1}")
    command = Command("serve", "--config", str(config), "--triton", pool.grpc)
    url = command.ready()["url"]
    try:
        async with aiohttp.ClientSession(base_url=url.removesuffix("/v1")) as http:
            ask = {"model": "assistant-large", **LONG}
            stream = asyncio.ensure_future(read(http, ask | {"stream": True}))
            whole = asyncio.ensure_future(http.post("/v1/chat/completions", json=ask))
            await until(lambda: pool.gauge("running") > 1)
            command.process.send_signal(signal.SIGTERM)
            error = json.loads((await stream)[-1])["error"]
            async with await whole as reply:
                refused = (await reply.json())["error"]
        assert (error["code"], reply.status, refused["code"]) == ("draining", 503, "draining")
        assert command.process.wait(timeout=PATIENCE_S) == 0
    finally:
        command.process.kill()
    await until(pool.is_idle)


async def test_sigterm_to_the_launcher_ends_server_and_stub(triton_environment: Path) -> None:
    ports = ("--grpc-port", "0", "--metrics-port", "0")
    command = Command("triton", *ports, "--threads", "1", CAUSEWAY_TRITON_ENV=str(triton_environment))
    pool = Pool(command)
    server, stub = pool.server, pool.stub
    assert await asyncio.to_thread(command.stop) == 0
    assert not server.is_running()
    await until(lambda: not stub.is_running())
    assert not list(SHARED_MEMORY.glob(f"triton_python_backend_shm_region_causeway{command.process.pid}_*"))


async def test_killed_launcher_takes_the_server_with_it(triton_environment: Path) -> None:
    ports = ("--grpc-port", "0", "--metrics-port", "0")
    command = Command("triton", *ports, "--threads", "1", CAUSEWAY_TRITON_ENV=str(triton_environment))
    pool = Pool(command)
    server, stub = pool.server, pool.stub
    command.process.kill()
    await until(lambda: not server.is_running() and not stub.is_running())
