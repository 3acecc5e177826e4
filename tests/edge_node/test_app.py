"""The daemon's lifecycle: start, watchdog, reload, drain, close; and what it must not import."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec
import pytest

from causeway_server.edge_node.app import build
from causeway_server.edge_node.clock import Clock
from causeway_server.edge_node.config.schema import Config, ServerConfig
from causeway_server.edge_node.storage.policies import DEFAULT_POLICY
from causeway_server.models.catalog.artifact import ArtifactNotFound
from causeway_server.router.policy.compiled import parse_policy
from tests.waiting import until

from .device import POLICY, Device, config, running
from .scripted import EDGE_WORDS, ScriptedCloud, ScriptedEngine

HEAVY = (
    "numpy",
    "onnxruntime",
    "torch",
    "llama_cpp",
    "transformers",
    "openai",
    "tritonclient",
    "paho",
    "PIL",
    "av",
    "faster_whisper",
    "rapidocr_onnxruntime",
    # for the first request that is not plain, for the first scrape, and for errors
    "aiohttp",
    "attr",
    "email",
    "prometheus_client",
    "http.client",
    "urllib.request",
    "difflib",
    "packaging",
)


async def test_draining_finishes_requests_in_progress_and_accepts_no_other(device: Device) -> None:
    device.engine.gate = asyncio.Event()
    inside = asyncio.ensure_future(device.ask("inside", stream=True))
    await until(lambda: device.engine.running == 1)
    draining = asyncio.ensure_future(device.app.drain())
    await until(lambda: device.parts.admission.draining)
    with pytest.raises(aiohttp.ClientError):
        await device.get("/healthz")
    device.engine.gate.set()
    answer = await inside
    assert answer.text == "".join(EDGE_WORDS)
    assert answer.done
    assert await draining is True


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_requests_left_after_the_drain_timeout_are_told_so(tmp_path: Path, stream: bool) -> None:
    """A stream that has begun ends with an error event; a request without a first byte gets a 503."""
    server = ServerConfig(port=0, drain_s=0.05)
    async with running(tmp_path, server=server) as device:
        device.engine.pause_after = 1 if stream else 0
        cut = asyncio.ensure_future(device.ask("stuck", stream=stream))
        await until(lambda: device.engine.paused)
        assert await device.app.drain() is False
        await device.app.close()
        answer = await cut
        if stream:
            assert (answer.status, answer.text, answer.finish_reasons) == (200, EDGE_WORDS[0], [])
            error = answer.events[-1]["error"]
            assert isinstance(error, dict)
            assert error["code"] == "draining"
        else:
            assert (answer.status, answer.code, answer.headers["Retry-After"]) == (503, "draining", "1")
        assert (device.newest().outcome.status, device.newest().outcome.error) == ("error", "draining")
        device.assert_nothing_leaks()
        assert device.engine.closed


async def test_closing_leaves_no_task_and_no_thread(tmp_path: Path) -> None:
    before = {task for task in asyncio.all_tasks() if not task.done()}
    async with running(tmp_path) as device:
        await device.ask(temperature=0)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("journal")]
    # The task that looks is not one that was left.
    await until(lambda: not ({task for task in asyncio.all_tasks() if not task.done()} - before - {me()}))


async def test_a_failed_start_leaves_no_thread_task_or_engine(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        engine = ScriptedEngine()
        server = ServerConfig(port=taken.getsockname()[1])
        app = build(config(tmp_path, server=server), make_engine=lambda _: engine, environ={})
        with pytest.raises(Exception, match="another program listens"):
            await app.start()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("journal")]
    assert engine.closed


async def test_a_missing_model_is_a_target_that_is_down(tmp_path: Path) -> None:
    """The daemon starts, the cloud answers, and /readyz names the model."""

    def missing(model: str) -> ScriptedEngine:
        raise ArtifactNotFound(f"no model named {model!r}")

    cloud = await ScriptedCloud().start()
    app = build(config(tmp_path, cloud=cloud.url), make_engine=missing, environ={})
    await app.start()
    async with aiohttp.ClientSession(f"http://127.0.0.1:{app.port}") as session:
        device = Device(app, ScriptedEngine(), cloud, session)
        answer = await device.ask()
        assert answer.headers["x-causeway-target"] == "large"
        readiness = await device.get("/readyz")
        assert readiness.json["problems"] == ["no model named 'm-small'"]
        only = await device.ask(headers={"x-causeway-prefer": "only_on_device"})
        assert only.status == 503
        assert "no model named 'm-small'" in only.message
    await app.close()
    await cloud.stop()


@pytest.mark.slow
async def test_a_new_policys_models_replace_the_previous_ones(tmp_path: Path) -> None:
    """Engines of models that the policy no longer names are closed."""
    engines: dict[str, ScriptedEngine] = {}

    def make(model: str) -> ScriptedEngine:
        engines[model] = ScriptedEngine(model)
        engines[model].state = "stopped"
        return engines[model]

    app = build(config(tmp_path), make_engine=make, environ={})
    await app.start()
    await until(lambda: engines["m-small"].state == "ready")
    (tmp_path / "policy.yaml").write_text(POLICY.replace("m-small", "m-other"))
    await app.parts.policies.reload()
    await until(lambda: engines["m-small"].closed and engines["m-other"].state == "ready")
    await app.close()
    assert engines["m-other"].closed


class Systemd:
    """The other end of NOTIFY_SOCKET."""

    def __init__(self, path: Path) -> None:
        self.environ = {"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": "20000"}
        self.messages: list[str] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.setblocking(False)

    def listen(self) -> list[str]:
        with contextlib.suppress(BlockingIOError):
            while True:
                self.messages.append(self._socket.recv(4096).decode())
        return self.messages

    def close(self) -> None:
        self._socket.close()


async def test_a_daemon_that_waits_for_a_target_asks_systemd_for_more_time(tmp_path: Path) -> None:
    """Again and again, so that a finite start timeout ends only a daemon that hangs."""
    engine, now = ScriptedEngine(), 0.0
    systemd = Systemd(tmp_path / "notify")
    clock = Clock(lambda: time.monotonic() + now)
    app = build(config(tmp_path), make_engine=lambda _: engine, environ=systemd.environ, clock=clock)
    await app.start()
    engine.state = "loading"
    asked = "EXTEND_TIMEOUT_USEC=60000000\nSTATUS=waiting for target small"
    await until(lambda: systemd.listen().count(asked) == 1)
    now += 10.0
    await until(lambda: systemd.listen().count(asked) == 2)
    engine.state = "ready"
    await until(lambda: any(message.startswith("READY=1") for message in systemd.listen()))
    await app.close()
    systemd.close()


async def test_the_watchdog_is_pinged_only_while_routing_works(tmp_path: Path) -> None:
    """READY once, then a ping after each trial decision."""
    engine = Sick()
    systemd = Systemd(tmp_path / "notify")
    app = build(config(tmp_path), make_engine=lambda _: engine, environ=systemd.environ)
    await app.start()
    await until(lambda: systemd.listen().count("WATCHDOG=1") >= 2)
    await until(lambda: [message[:7] for message in systemd.listen()].count("READY=1") == 1)
    engine.sick = True
    await until(lambda: engine.refused >= 1)
    systemd.listen()
    fed = systemd.messages.count("WATCHDOG=1")
    seen = engine.refused
    await until(lambda: engine.refused >= seen + 2)
    systemd.listen()
    assert systemd.messages.count("WATCHDOG=1") == fed
    engine.sick = False
    await until(lambda: systemd.listen().count("WATCHDOG=1") > fed)
    await app.drain()
    await app.close()
    assert any(message.startswith("STOPPING=1") for message in systemd.listen())
    systemd.close()


class Sick(ScriptedEngine):
    """Its signals break when it is sick, and so does every decision."""

    def __init__(self) -> None:
        super().__init__()
        self.sick = False
        self.refused = 0

    def signals(self):  # type: ignore[no-untyped-def]
        if self.sick:
            self.refused += 1
            raise RuntimeError("no signals")
        return super().signals()


DAEMON = """
import asyncio, json, sys, time
from pathlib import Path
started = time.monotonic()
import msgspec
from causeway_server.edge_node.app import build
from causeway_server.edge_node.config.schema import Config
from causeway_server.router.serving.logs import start_log
config = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Config)
def imported():
    return [name for name in json.loads(sys.argv[2]) if name in sys.modules]
def ready(app):
    status = Path("/proc/self/status").read_text()
    rss_mb = int(status.split("VmRSS:")[1].split()[0]) / 1024
    print(json.dumps({"port": app.port, "heavy": imported(), "rss_mb": rss_mb}), flush=True)
start_log(config.log, config.log_format)
asyncio.run(build(config).serve(on_ready=ready))
print(json.dumps(imported()), flush=True)
"""


class Started(msgspec.Struct, frozen=True):
    port: int
    heavy: list[str]
    rss_mb: float


@asynccontextmanager
async def daemon(tmp_path: Path, settings: Config) -> AsyncIterator[tuple[asyncio.subprocess.Process, Started]]:
    path = tmp_path / "config.json"
    path.write_bytes(msgspec.json.encode(settings))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", DAEMON, str(path), msgspec.json.encode(HEAVY).decode(),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 60)
        assert line, (await process.stderr.read()).decode() if process.stderr else ""
        yield process, msgspec.json.decode(line, type=Started)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def cloud_only(tmp_path: Path, url: str) -> Config:
    settings = config(
        tmp_path,
        policy=POLICY,
        cloud=url,
        server=ServerConfig(port=0, socket=str(tmp_path / "edge.sock"), drain_s=240.0),
    )
    engine = msgspec.structs.replace(settings.engine, enabled=False)
    return msgspec.structs.replace(settings, engine=engine)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_and_ends_the_process(tmp_path: Path, how: signal.Signals) -> None:
    """The answer in progress is finished, and the socket file is removed."""
    cloud = await ScriptedCloud().start()
    cloud.gate = asyncio.Event()
    async with daemon(tmp_path, cloud_only(tmp_path, cloud.url)) as (process, started):
        async with aiohttp.ClientSession(f"http://127.0.0.1:{started.port}") as session:
            body = {"model": "large", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
            response_task = asyncio.ensure_future(session.post("/v1/chat/completions", json=body))
            await until(lambda: cloud.running == 1)
            process.send_signal(how)
            await until(lambda: not listening(started.port))
            cloud.gate.set()
            async with await response_task as response:
                assert (await response.read()).endswith(b"data: [DONE]\n\n")
        assert await asyncio.wait_for(process.wait(), 60) == 0
    assert not os.path.exists(tmp_path / "edge.sock")  # noqa: ASYNC240, PTH110
    await cloud.stop()


@pytest.mark.slow
async def test_a_sigint_during_the_drain_ends_it_at_once(tmp_path: Path) -> None:
    cloud = await ScriptedCloud().start()
    cloud.gate = asyncio.Event()
    async with (
        daemon(tmp_path, cloud_only(tmp_path, cloud.url)) as (process, started),
        aiohttp.ClientSession() as session,
    ):
        body = {"model": "large", "messages": [{"role": "user", "content": "hi"}]}
        url = f"http://127.0.0.1:{started.port}/v1/chat/completions"
        response_task = asyncio.ensure_future(session.post(url, json=body))
        await until(lambda: cloud.running == 1)
        process.send_signal(signal.SIGTERM)
        await until(lambda: not listening(started.port))
        process.send_signal(signal.SIGINT)
        async with await response_task as response:
            assert response.status == 503
        assert await asyncio.wait_for(process.wait(), 60) == 0
        await until(lambda: cloud.running == 0)
    await cloud.stop()


@pytest.mark.slow
async def test_a_second_sigterm_is_ignored(tmp_path: Path) -> None:
    """A dying parent sends one for each of its threads."""
    cloud = await ScriptedCloud().start()
    cloud.gate = asyncio.Event()
    async with (
        daemon(tmp_path, cloud_only(tmp_path, cloud.url)) as (process, started),
        aiohttp.ClientSession() as session,
    ):
        body = {"model": "large", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        url = f"http://127.0.0.1:{started.port}/v1/chat/completions"
        response_task = asyncio.ensure_future(session.post(url, json=body))
        await until(lambda: cloud.running == 1)
        process.send_signal(signal.SIGTERM)
        await until(lambda: not listening(started.port))
        process.send_signal(signal.SIGTERM)
        cloud.gate.set()
        async with await response_task as response:
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
        assert await asyncio.wait_for(process.wait(), 60) == 0
    await cloud.stop()


@pytest.mark.slow
async def test_sighup_reloads_the_policy(tmp_path: Path) -> None:
    async with daemon(tmp_path, cloud_only(tmp_path, "http://127.0.0.1:9/v1")) as (process, started):
        (tmp_path / "policy.yaml").write_text(POLICY.replace("name: test", "name: changed"))
        process.send_signal(signal.SIGHUP)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{started.port}") as session:
            name, ends = "", time.monotonic() + 60.0
            while name != "changed":
                assert time.monotonic() < ends, name
                async with session.get("/readyz") as response:
                    name = (await response.json())["policy"]["name"]


@pytest.mark.slow
async def test_the_daemon_without_a_model_is_below_75_mb(tmp_path: Path) -> None:
    """And has imported none of the heavy packages after a chat, its hit, a stream, and the requests of monitors."""
    cloud = await ScriptedCloud().start()
    async with daemon(tmp_path, cloud_only(tmp_path, cloud.url)) as (process, started):
        assert started.heavy == []
        assert started.rss_mb < 75
        async with aiohttp.ClientSession(f"http://127.0.0.1:{started.port}") as session:
            chat: dict[str, object] = {"model": "large", "messages": [{"role": "user", "content": "hi"}]}
            for more in ({"temperature": 0}, {"temperature": 0}, {"stream": True}):
                async with session.post("/v1/chat/completions", json=chat | more) as response:
                    assert response.status == 200
                    await response.read()
            for path in ("/healthz", "/readyz", "/v1/models"):
                async with session.get(path) as response:
                    assert response.status == 200
        assert len(cloud.bodies) == 2
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        assert msgspec.json.decode(await process.stdout.read()) == []
    await cloud.stop()


def test_the_default_policy_is_valid() -> None:
    assert parse_policy(DEFAULT_POLICY.read_text(), str(DEFAULT_POLICY)).name == "default"


def me() -> asyncio.Task[object] | None:
    return asyncio.current_task()


def listening(port: int) -> bool:
    with socket.socket() as knock:
        return knock.connect_ex(("127.0.0.1", port)) == 0
