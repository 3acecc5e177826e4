"""A prompt is in no log line at any level, and in no metric, span or audit record, whatever fails on its way."""

from __future__ import annotations

import asyncio
import io
import logging
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import grpc
import msgspec
import pytest
from click.testing import CliRunner
from tritonclient.grpc import service_pb2_grpc

from causeway_server.cloud_pool.app import build
from causeway_server.cloud_pool.background import run_worker
from causeway_server.cloud_pool.cli.jobs import dlq
from causeway_server.cloud_pool.config import Config
from causeway_server.cloud_pool.http.config import ServerConfig
from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.router.config import TracingConfig
from causeway_server.router.serving.logs import OURS, log_loop_errors, start_log
from tests.cloud_pool.accounts.identity.gateway import running
from tests.cloud_pool.upstreams.test_triton_client import FakeTriton, Reply, Script, piece
from tests.e2e.tracing.collector import Collector
from tests.redis_server import RedisServer
from tests.redis_server import redis_server as redis_server  # a fixture

from .unreachable import unreachable_tier

MARKER = "zebra-7f3a-quagga"
CHAT = {"model": "large", "messages": [{"role": "user", "content": f"tell me of {MARKER}"}]}
PATIENCE_S = 120.0
FINAL = {"succeeded", "failed", "dead", "cancelled", "expired"}


def replies(*texts: str, code: grpc.StatusCode | None = None, after: int = 0, whole: bool = False) -> Script:
    """Send `after` pieces of an answer, then an error for each of `texts`, as a status if there is a `code`."""

    async def script(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Reply]:
        if request.id == "probe":
            yield piece("a", "stop", final=True)
            return
        for _ in range(after):
            yield piece(f"of {MARKER} ")
        for text in texts:
            if code is not None:
                await context.abort(code, text)
            yield Reply(error_message=text)
        if whole:
            yield piece("", "stop", final=True)

    return script


async def malformed(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Reply]:
    reply = piece(MARKER)
    reply.infer_response.raw_output_contents[0] = b"\xff\xff\xff\xff" + MARKER.encode()
    yield piece("a", "stop", final=True) if request.id == "probe" else reply


async def raises(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Reply]:
    if request.id != "probe":
        raise ValueError(MARKER)
    yield piece("a", "stop", final=True)


STATUSES = ("INVALID_ARGUMENT", "INTERNAL", "UNAVAILABLE", "NOT_FOUND", "DEADLINE_EXCEEDED", "UNKNOWN")
FAULTS: dict[str, Script] = {
    "an answer": replies(after=2, whole=True),
    "the model raised": replies(f"Failed to process the request(s), message: ValueError: {MARKER}\n\nAt:\n  m.py(7)"),
    "our engine's code": replies(f"engine_crashed: the engine stopped: {MARKER}"),
    "an invalid request": replies(f"invalid_schema: {MARKER}"),
    "an unknown code": replies(f"some_code: {MARKER}"),
    "refused tensors": replies(f"[request id: 1] inference input {MARKER!r} is unexpected"),
    "a dead stub": replies(f"Stub process 'm' is not healthy: {MARKER}"),
    **{name: replies(MARKER, code=grpc.StatusCode[name]) for name in STATUSES},
    "an error in the answer": replies(f"engine_crashed: {MARKER}", after=2),
    "a status in the answer": replies(MARKER, after=2, code=grpc.StatusCode.INTERNAL),
    "an answer without an end": replies(after=2),
    "a malformed answer": malformed,
    "the server raises": raises,
}
INVALID: list[tuple[str, bytes]] = [
    ("/v1/chat/completions", f'{{"messages": "{MARKER}'.encode()),
    ("/v1/chat/completions", msgspec.json.encode({**CHAT, "model": MARKER})),
    ("/v1/chat/completions", msgspec.json.encode({**CHAT, "temperature": MARKER})),
    ("/v1/chat/completions", msgspec.json.encode({**CHAT, "response_format": {"type": MARKER}})),
    ("/v1/completions", msgspec.json.encode({"model": "large", "prompt": MARKER, "suffix": MARKER})),
    ("/v1/jobs", msgspec.json.encode({**CHAT, "webhook": f"https://127.0.0.1/{MARKER}"})),
    (f"/v1/{MARKER}", b""),
]


@pytest.fixture(params=["text", "json"])
def log(request: pytest.FixtureRequest) -> Iterator[io.StringIO]:
    """The log of this process, at debug."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    start_log("debug", request.param, stream)
    try:
        yield stream
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        logging.getLogger(OURS).setLevel(logging.NOTSET)


@asynccontextmanager
async def serving(script: Script) -> AsyncIterator[str]:
    """The address of a scripted Triton."""
    server = grpc.aio.server()
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(FakeTriton(script), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@pytest.fixture
def empty_redis(redis_server: RedisServer) -> RedisServer:
    redis_server.flush()
    return redis_server


def config(address: str, redis: str, folder: Path, collector: str) -> Config:
    tier = msgspec.structs.replace(unreachable_tier(), triton=address)
    return Config(
        server=ServerConfig(port=0),
        tiers=(tier,),
        redis=redis,
        jobs=JobsConfig(max_attempts=1, backoff_s=0.01, backoff_max_s=0.01, lease_check_s=0.02, durability="warn"),
        tracing=TracingConfig(endpoint=collector),
        audit_file=str(folder / "audit"),
        log="debug",
    )


@pytest.mark.redis
@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
async def test_no_fault_brings_a_prompt_into_logs_metrics_spans_or_audit_records(
    fault: str, log: io.StringIO, empty_redis: RedisServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Answers, streams and jobs, with a gateway and a worker at debug; dead letters are listed."""
    log_loop_errors(asyncio.get_running_loop())
    collector = await Collector().start()
    stop = asyncio.Event()
    async with serving(FAULTS[fault]) as address:
        settings = config(address, empty_redis.url, tmp_path, collector.url)
        async with anyio.create_task_group() as tasks:
            app = build(settings, tasks)
            await app.start()
            tasks.start_soon(run_worker, settings, stop)
            base = app.url.removesuffix("/v1")
            with anyio.fail_after(PATIENCE_S):
                async with aiohttp.ClientSession(base) as http:
                    for stream in (False, True):
                        async with http.post("/v1/chat/completions", json={**CHAT, "stream": stream}) as answer:
                            await answer.read()
                    for path, body in INVALID:
                        async with http.post(path, data=body) as answer:
                            assert answer.status >= 400
                    # A model that is not loaded costs a job no attempt: such a job waits for the end of its time.
                    deadline = {"deadline_ms": 1000 if fault == "NOT_FOUND" else 5000}
                    async with http.post("/v1/jobs", json={**CHAT, **deadline}) as answer:
                        job = (await answer.json())["id"]
                    while True:
                        async with http.get(f"/v1/jobs/{job}") as answer:
                            if (await answer.json())["status"] in FINAL:
                                break
                        await asyncio.sleep(0.05)
                    async with http.get(f"{app.operator_url}/metrics") as answer:
                        seen = {"metrics": await answer.text()}
            stop.set()
            await app.stop()
        await app.close()
    result = await anyio.to_thread.run_sync(
        lambda: CliRunner().invoke(dlq, ["--redis", empty_redis.url, "list"], env={"COLUMNS": "300"})
    )
    await collector.stop()
    output = capfd.readouterr()
    seen |= {"log": log.getvalue(), "stdout": output.out, "stderr": output.err, "dead letters": result.output}
    seen |= {"spans": repr(collector.spans), "audit": (tmp_path / "audit").read_text()}
    assert seen["log"]
    assert collector.spans
    assert [name for name, text in seen.items() if MARKER in text] == []
    assert seen["audit"].count('"route":"job"') >= 1


async def test_an_unexpected_exception_is_logged_without_its_message(log: io.StringIO) -> None:
    """Neither its own message nor those of its causes; class and source lines are there."""

    class Broken(Exception):
        pass

    fault: Any = Broken(MARKER)
    fault.__cause__ = ExceptionGroup(MARKER, [KeyError(MARKER), ValueError(MARKER)])
    async with running(Config(tiers=(unreachable_tier("assistant-large"),))) as gateway:
        for stream in (False, True):
            gateway.service.fault = fault
            body = {**CHAT, "model": "assistant-large", "stream": stream}
            async with (
                aiohttp.ClientSession() as http,
                http.post(f"{gateway.url}/v1/chat/completions", json=body) as answer,
            ):
                text = await answer.text()
                assert "internal_error" in text
                assert "HTTP/1.1" not in text
    text = log.getvalue()
    assert MARKER not in text
    for said in ("Broken", "gateway.py", "ExceptionGroup", "KeyError", "ValueError"):
        assert said in text


async def test_errors_that_no_task_handles_are_logged_without_their_message(log: io.StringIO) -> None:
    loop = asyncio.get_running_loop()
    log_loop_errors(loop)

    def breaks(_: str) -> None:
        raise ValueError(MARKER)

    loop.call_soon(breaks, MARKER)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert "ValueError" in log.getvalue()
    assert "breaks" in log.getvalue()
    assert MARKER not in log.getvalue()


def test_a_crash_is_logged_without_its_message() -> None:
    """Of the process, of a thread, and of what cannot be raised."""
    program = f"""
import threading
from causeway_server.router.serving.logs import log_crashes, start_log
class Unraisable:
    def __del__(self): raise OSError("{MARKER}")
def breaks(): raise KeyError("{MARKER}")
start_log("debug", "text")
log_crashes()
Unraisable()
thread = threading.Thread(target=breaks)
thread.start()
thread.join()
raise ValueError("{MARKER}") from RuntimeError("{MARKER}")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    for said in ("ValueError", "RuntimeError", "KeyError", "OSError", "The process failed.", "A thread failed."):
        assert said in ended.stderr
    assert MARKER not in ended.stderr + ended.stdout


def test_libraries_log_no_more_than_warnings(log: io.StringIO) -> None:
    for name in ("redis", "aiohttp.client", "urllib3.connectionpool", "grpc", "asyncio"):
        logging.getLogger(name).debug("sent %s", MARKER)
        logging.getLogger(name).info("sent %s", MARKER)
    logging.getLogger("causeway_server.cloud_pool").debug("ours")
    assert MARKER not in log.getvalue()
    assert "ours" in log.getvalue()
