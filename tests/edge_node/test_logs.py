"""What the log says: each lasting fault once when it begins and once when it ends, whichever request notices it.

`/readyz` lists it meanwhile. At debug the log tells each request's hops.
"""

from __future__ import annotations

import asyncio
import io
import logging
import re
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest

from causeway_server.edge_node.config.schema import ServerConfig
from causeway_server.edge_node.storage.background_sqlite import BackgroundSqlite, Write
from causeway_server.router.serving.logs import OURS, start_log
from tests.waiting import until

from .device import Device, running
from .scripted import ScriptedCloud
from .test_app import cloud_only, daemon

NOISY = ("aiohttp.access", "aiohttp.client", "asyncio", "grpc", "httpcore", "httpx", "redis", "urllib3.connectionpool")


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """Every line from `info` up, as ``LEVEL message``; grows while the test runs."""

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(f"{record.levelname} {record.getMessage()}")

    found: list[str] = []
    handler = Lines(logging.INFO)
    caplog.set_level(logging.INFO)
    logging.getLogger().addHandler(handler)
    yield found
    logging.getLogger().removeHandler(handler)


def about(lines: list[str], *words: str) -> list[str]:
    """The lines with any of the words, without figures that differ from run to run."""
    return [re.sub(r" \(after [0-9.]+ s\)|127.0.0.1:\d+", "", line) for line in lines if any(w in line for w in words)]


async def problems(device: Device) -> list[str]:
    found = (await device.get("/readyz")).json["problems"]
    assert isinstance(found, list)
    return found


async def metric(device: Device, name: str) -> float:
    text = (await device.get("/metrics")).body.decode()
    return float(next(line for line in text.splitlines() if line.startswith(f"{name} ")).rpartition(" ")[2])


async def test_a_request_that_notices_the_lost_cloud_first_says_so_once(tmp_path: Path, lines: list[str]) -> None:
    async with running(tmp_path) as device:
        port = device.cloud.port
        assert (await device.ask(tags="cloud")).headers["x-causeway-route"] == "cloud"
        await device.cloud.stop()
        for _ in range(3):
            assert (await device.ask(tags="cloud")).headers["x-causeway-route"] == "edge"
        assert [problem.partition(" at ")[0] for problem in await problems(device)] == ["The cloud"]
        await device.cloud.start(port)
        await until_back(device)
        assert await problems(device) == []
    assert about(lines, "reach") == [
        "INFO The cloud at  is reachable.",
        "WARNING The cloud at  cannot be reached: Connection refused",
        "INFO The cloud at  is reachable again.",
    ]


async def until_back(device: Device) -> None:
    assert device.parts.clouds.first is not None
    assert await device.parts.clouds.first.probe()


async def test_a_refused_token_is_an_error_a_problem_and_a_metric(tmp_path: Path, lines: list[str]) -> None:
    async with running(tmp_path, api_key="wrong") as device:
        device.cloud.status = 401
        for _ in range(3):
            assert (await device.ask(tags="cloud")).headers["x-causeway-route"] == "edge"
        await until_back(device)  # this server lists its models without a token
        assert "refuses the token (HTTP 401)" in (await problems(device))[0]
        assert await metric(device, 'causeway_edge_cloud_token_refused{cloud="main"}') == 1.0
        device.cloud.status = 200
        assert (await device.ask(tags="cloud")).headers["x-causeway-route"] == "cloud"
        assert await problems(device) == []
        assert await metric(device, 'causeway_edge_cloud_token_refused{cloud="main"}') == 0.0
    refused, accepted = about(lines, "token")
    assert refused.startswith("ERROR The cloud at  refuses the token (HTTP 401): correct clouds.main.key")
    assert accepted == "INFO The cloud at  accepts the token again."
    assert "wrong" not in "".join(lines)


async def test_the_circuit_breaker_says_when_it_opens(tmp_path: Path, lines: list[str]) -> None:
    async with running(tmp_path) as device:
        device.cloud.status = 500
        for _ in range(8):
            await device.ask(tags="cloud")
        (problem,) = await problems(device)
        assert "failed repeatedly, and its circuit breaker is open" in problem
    assert len(about(lines, "circuit breaker")) == 1


def test_a_full_disk_is_an_error_and_its_end_says_what_was_lost(tmp_path: Path, lines: list[str]) -> None:
    database = BackgroundSqlite(tmp_path / "x.sqlite", "CREATE TABLE IF NOT EXISTS t (v)", retry_s=0.0, linger_s=0.0)
    database.start()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        write(database, "small")
        wait(lambda: not database.stats().queued_writes)
        resource.setrlimit(resource.RLIMIT_FSIZE, (16 * 1024, hard))  # SQLite reports it as a full disk
        for lost in (1, 2, 3):
            write(database, "x" * 100_000)
            wait(lambda lost=lost: database.stats().lost_writes == lost)  # type: ignore[misc]
        assert "disk" in database.stats().problem
        assert not database.stats().available
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        write(database, "small")
        wait(lambda: database.stats().available)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        database.close()
    began, ended = about(lines, "x.sqlite")
    assert re.fullmatch(r"ERROR .*x.sqlite cannot be used \(.*disk.*\): new entries stay in memory. .*", began)
    assert re.fullmatch(r"INFO .*x.sqlite can be written again; 3 writes were lost\.", ended)


def test_a_row_that_cannot_be_encoded_is_lost_and_the_next_ones_are_not(tmp_path: Path, lines: list[str]) -> None:
    database = BackgroundSqlite(tmp_path / "x.sqlite", "CREATE TABLE IF NOT EXISTS t (v)", linger_s=0.0)
    database.start()
    write(database, "\udcff")
    wait(lambda: database.stats().lost_writes == 1)
    write(database, "small")
    wait(lambda: not database.stats().queued_writes)
    assert asyncio.run(database.read("SELECT v FROM t", timeout_s=60.0)) == [("small",)]
    assert database.stats().available
    database.close()
    (line,) = about(lines, "x.sqlite")
    assert "1 writes were lost: UnicodeEncodeError" in line


def write(database: BackgroundSqlite, value: str) -> None:
    assert database.write(Write("INSERT INTO t VALUES (?)", (value,), len(value)))


def wait(condition: Callable[[], bool]) -> None:
    asyncio.run(until(condition))


async def test_storage_that_is_lost_is_a_problem_of_readyz(tmp_path: Path, lines: list[str]) -> None:
    """The state folder cannot be written: the daemon answers, and says what it does not keep."""
    (tmp_path / "state").write_text("not a folder")
    async with running(tmp_path) as device:
        for _ in range(3):
            assert (await device.ask(tags="cloud")).status == 200
        await until(lambda: len(device.parts.problems()) == 4)
        found = " ".join(await problems(device))
        assert all(name in found for name in ("cache-2.sqlite", "decisions-2.sqlite", "spend-1.sqlite", "last-good"))
        assert await metric(device, 'causeway_edge_store_available{store="decisions"}') == 0.0
    assert [line.partition(" ")[0] for line in about(lines, "sqlite", "last-good")] == ["ERROR"] * 4


async def test_the_drain_and_what_it_cuts_are_logged(tmp_path: Path, lines: list[str]) -> None:
    async with running(tmp_path, server=ServerConfig(port=0, drain_s=0.05)) as device:
        device.engine.pause_after = 1
        cut = asyncio.ensure_future(device.ask(stream=True, headers={"x-causeway-prefer": "only_on_device"}))
        await until(lambda: device.engine.paused)
        await device.app.drain()
        await device.app.close()
        await cut
    assert about(lines, "Drain", "cut") == [
        "INFO Draining for up to 0.05 s. Requests in progress: 1.",
        "WARNING Requests cut off at the end of the drain: 1. Their clients get an error.",
    ]


@pytest.mark.slow
async def test_a_signal_and_the_end_are_logged(tmp_path: Path) -> None:
    cloud = await ScriptedCloud().start()  # without any target the daemon is never ready
    async with daemon(tmp_path, cloud_only(tmp_path, cloud.url)) as (process, _):
        process.send_signal(signal.SIGTERM)
        _, log = await process.communicate()
    await cloud.stop()
    told = [line.partition("lifecycle: ")[2] for line in log.decode().splitlines() if "lifecycle: " in line]
    assert told[-3:] == ["SIGTERM received.", "Draining for up to 240 s. Requests in progress: 0.", "Stopped."]


async def test_debug_tells_each_requests_hops_without_content(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running(tmp_path) as device:
        device.engine.fault = "refuse"
        with caplog.at_level(logging.DEBUG):
            answer = await device.ask("my secret", tags="edge-ish", temperature=0.5)
            await until(lambda: "ended" in caplog.text)
    request_id = answer.headers["x-causeway-decision"]
    told = [record.getMessage() for record in caplog.records if record.getMessage().startswith(f"Request {request_id}")]
    hops = [line.removeprefix(f"Request {request_id} ").partition(",")[0] for line in told]
    assert hops == [
        "arrived: chat auto from 127.0.0.1",
        "was decided: small",
        "tried small: failed engine_unavailable",
        "tried large: done",
        "ended: ok 200",
    ]
    assert "secret" not in caplog.text


@pytest.mark.parametrize("level", ["debug", "info"])
def test_libraries_stay_quiet(level: Literal["debug", "info"]) -> None:
    root = logging.getLogger()
    before = root.level, list(root.handlers)
    stream = io.StringIO()
    try:
        start_log(level, "text", stream)
        for name in NOISY:
            logging.getLogger(name).debug("noise")
            logging.getLogger(name).info("noise")
            logging.getLogger(name).warning("%s warns", name)
    finally:
        root.setLevel(before[0])
        root.handlers = before[1]
        logging.getLogger(OURS).setLevel(logging.NOTSET)
    assert "noise" not in stream.getvalue()
    assert stream.getvalue().count("warns") == len(NOISY)
