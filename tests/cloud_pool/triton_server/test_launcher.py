"""The launcher with a scripted server; test_failures has the real Triton under it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import psutil
import pytest

from causeway_server.cloud_pool.triton_server.launcher import STUCK_S, Launcher, LogFilter, ServerCommand
from causeway_server.cloud_pool.triton_server.server_process import (
    SHARED_MEMORY,
    Ports,
    ServedModel,
    choose_ports,
    clear_orphans,
    command,
    find_environment,
    memory_prefix,
    write_repository,
)
from causeway_server.models.llama_cpp.protocol import EngineOptions
from causeway_server.router.errors import ConfigError
from tests.waiting import until

pytestmark = pytest.mark.slow

# Ready at once; leaves a child and a shared memory region behind when it is killed, as Triton does.
SERVER = """
import subprocess  # the child first: the launcher waits for it, and a busy machine imports slowly
child = subprocess.Popen(["sleep", "600"])
import concurrent.futures, pathlib, signal, sys
import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc
port, region = int(sys.argv[1]), pathlib.Path(sys.argv[2])
region.touch()
def end(*_):
    child.kill(); region.unlink(); sys.exit(0)
signal.signal(signal.SIGTERM, end)
ready = True
def lose(*_):  # a stub that dies at its start: this server waits for it
    global ready
    ready = False
    child.kill()
signal.signal(signal.SIGUSR1, lose)
class Ready(service_pb2_grpc.GRPCInferenceServiceServicer):
    def ServerReady(self, request, context):
        return service_pb2.ServerReadyResponse(ready=ready)
print("I1121 17:07:24.723972 9688 model_lifecycle.cc:472] \\"loading: m:1\\"", child.pid, flush=True)
server = grpc.server(concurrent.futures.ThreadPoolExecutor(2))
service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Ready(), server)
server.add_insecure_port(f"127.0.0.1:{port}")
server.start()
server.wait_for_termination()
"""


class Bed:
    """A launcher over SERVER, and what it printed."""

    def __init__(
        self,
        folder: Path,
        *,
        restart: bool = True,
        argv: list[str] | None = None,
        server: str = SERVER,
        stuck_s: float = STUCK_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ports = choose_ports(Ports(grpc=0, metrics=0))
        self.prefix = f"causeway-test-{os.getpid()}-{self.ports.grpc}_"
        self.region = SHARED_MEMORY / f"{self.prefix}region"
        script = folder / "server.py"
        script.write_text(server)
        self.ready_lines: list[str] = []
        self.logged: list[str] = []
        self.launcher = Launcher(
            ServerCommand(
                argv=argv or [sys.executable, str(script), str(self.ports.grpc), str(self.region)],
                environ=os.environ,
                ports=self.ports,
                memory_prefix=self.prefix,
                expected_children=1,
            ),
            drain_s=5.0,
            restart=restart,
            print_ready=self.ready_lines.append,
            log=self.logged.append,
            stuck_s=stuck_s,
            clock=clock,
        )
        self.stop = asyncio.Event()

    def servers(self) -> list[psutil.Process]:
        return [one for one in psutil.Process().children() if str(self.ports.grpc) in one.cmdline()]


@contextlib.asynccontextmanager
async def running(bed: Bed) -> AsyncIterator[asyncio.Task[int]]:
    task = asyncio.ensure_future(bed.launcher.run(bed.stop))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_killed_server_is_restarted_and_its_leftovers_removed(tmp_path: Path) -> None:
    """Its child and its shared memory are gone, and the same ports are ready again."""
    bed = Bed(tmp_path)
    async with running(bed):
        await until(lambda: len(bed.ready_lines) == 1)
        (server,) = bed.servers()
        (child,) = server.children()
        server.send_signal(signal.SIGKILL)
        await until(lambda: len(bed.ready_lines) == 2)
        assert not psutil.pid_exists(child.pid) or child.status() == psutil.STATUS_ZOMBIE
    assert bed.ready_lines[0] == bed.ready_lines[1] == bed.ports.line()
    assert any("starting it again" in line for line in bed.logged)
    assert not bed.region.exists()


async def test_stop_lets_the_server_end_and_returns_0(tmp_path: Path) -> None:
    bed = Bed(tmp_path)
    async with running(bed) as task:
        await until(lambda: len(bed.ready_lines) == 1)
        (server,) = bed.servers()
        bed.stop.set()
        assert await task == 0
    assert not psutil.pid_exists(server.pid)
    assert not bed.region.exists()


async def test_cancelled_launcher_leaves_nothing(tmp_path: Path) -> None:
    bed = Bed(tmp_path)
    async with running(bed):
        await until(lambda: len(bed.ready_lines) == 1)
        (server,) = bed.servers()
    assert not psutil.pid_exists(server.pid) or server.status() == psutil.STATUS_ZOMBIE
    assert not bed.region.exists()


async def test_cancellation_wins_over_stop(tmp_path: Path) -> None:
    """Both come in one iteration while a dead server waits for its restart."""
    bed = Bed(tmp_path)
    async with running(bed) as task:
        await until(lambda: len(bed.ready_lines) == 1)
        bed.servers()[0].kill()
        await until(lambda: any("starting it again" in line for line in bed.logged))
        bed.stop.set()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_server_that_was_never_ready_is_not_restarted(tmp_path: Path) -> None:
    """Waiting repairs neither a wrong model nor a taken port; its last output is logged."""
    bed = Bed(tmp_path, argv=[sys.executable, "-c", "print('port is taken'); raise SystemExit(3)"])
    async with running(bed) as task:
        assert await task == 1
    assert "port is taken" in bed.logged
    assert any("status 3" in line for line in bed.logged)


async def test_no_restart_ends_with_status_1(tmp_path: Path) -> None:
    bed = Bed(tmp_path, restart=False)
    async with running(bed) as task:
        await until(lambda: len(bed.ready_lines) == 1)
        bed.servers()[0].kill()
        assert await task == 1
    assert len(bed.ready_lines) == 1


@pytest.mark.slow
async def test_server_that_waits_for_a_dead_stub_is_restarted(tmp_path: Path) -> None:
    bed = Bed(tmp_path, stuck_s=3.0)
    async with running(bed):
        await until(lambda: len(bed.ready_lines) == 1)
        bed.servers()[0].send_signal(signal.SIGUSR1)
        await until(lambda: len(bed.ready_lines) == 2)
    assert any("that has died, so it was killed" in line for line in bed.logged)


class PausedClock:
    """A clock that passes a minute at once, as for a launcher that was paused; `looks`: how often it was read since."""

    ahead_s, looks = 0.0, 0

    def __call__(self) -> float:
        self.looks += 1
        return time.monotonic() + self.ahead_s


async def test_a_launcher_that_was_paused_itself_looks_before_it_kills(tmp_path: Path) -> None:
    clock = PausedClock()
    bed = Bed(tmp_path, stuck_s=5.0, clock=clock)
    async with running(bed):
        await until(lambda: len(bed.ready_lines) == 1)
        clock.ahead_s, clock.looks = 60.0, 0
        await until(lambda: clock.looks >= 3)
        assert len(bed.servers()) == 1
    assert bed.logged[1:] == []


async def test_server_that_never_starts_its_stub_is_killed(tmp_path: Path) -> None:
    script = "import time; time.sleep(600)"
    bed = Bed(tmp_path, argv=[sys.executable, "-c", script], stuck_s=0.2)
    async with running(bed) as task:
        assert await task == 1
    assert any("that has died, so it was killed" in line for line in bed.logged)


@pytest.mark.slow
async def test_slowly_loading_server_with_a_living_stub_is_not_killed(tmp_path: Path) -> None:
    slow = SERVER.replace("ready = True", "ready = False", 1).replace("ready = False\n    child.kill()", "ready = True")
    bed = Bed(tmp_path, server=slow, stuck_s=3.0)
    async with running(bed):
        await until(bed.region.exists)
        ticks = asyncio.get_running_loop().time() + 4.0
        await until(lambda: asyncio.get_running_loop().time() > ticks)
        assert not any("killed" in line for line in bed.logged)
        bed.servers()[0].send_signal(signal.SIGUSR1)
        await until(lambda: len(bed.ready_lines) == 1)


def test_shared_memory_of_dead_launchers_is_removed() -> None:
    """That of a living one stays."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    dead = SHARED_MEMORY / f"{memory_prefix(gone.pid)}x"
    living = SHARED_MEMORY / f"{memory_prefix(os.getpid())}x"
    try:
        dead.touch()
        living.touch()
        clear_orphans()
        assert not dead.exists()
        assert living.exists()
    finally:
        living.unlink()


def test_port_0_becomes_a_free_port_of_its_own() -> None:
    ports = choose_ports(Ports(grpc=0, metrics=0))
    assert len({ports.grpc, ports.metrics} - {0}) == 2
    assert choose_ports(Ports(grpc=5, metrics=7)) == Ports(grpc=5, metrics=7)


@pytest.mark.parametrize(
    ("line", "readable"),
    [
        ('I1121 17:07:24.723972 9688 model_lifecycle.cc:472] "loading: echo:1"', "loading: echo:1"),
        ("E1121 17:07:24.7 9 model_lifecycle.cc:6] \"failed to load 'm'\"", "error: failed to load 'm'"),
        ('W1121 17:07:24.7 9 metrics.cc:798] "DCGM unable to start"', None),
        ("Error: Failed to initialize NVML", None),
        ("+-----+-----+", None),
        ("| python | /x |", None),
        ("I1121 17:07:25.033673 9688 server.cc:631] ", None),
        ("", None),
        ("ValueError: not a GGUF", "ValueError: not a GGUF"),
    ],
)
def test_log_filter(line: str, readable: str | None) -> None:
    """Complaints about missing GPUs and tables go; models, errors and the output of models stay."""
    assert LogFilter(lambda: False).readable(line) == readable


def test_repository_has_each_model_with_its_options(tmp_path: Path) -> None:
    write_repository(
        tmp_path,
        (
            ServedModel("a", EngineOptions(model_path="/w/a.gguf")),
            ServedModel("b", EngineOptions(model_path="/w/b.gguf")),
        ),
    )
    assert (tmp_path / "a" / "config.pbtxt").read_bytes() == (tmp_path / "b" / "config.pbtxt").read_bytes()
    options = msgspec.json.decode((tmp_path / "b" / "1" / "model.json").read_bytes(), type=EngineOptions)
    assert options.model_path == "/w/b.gguf"
    assert (tmp_path / "b" / "1" / "model.py").is_file()


def test_a_model_that_uses_the_gpu_is_one_instance_on_it(tmp_path: Path) -> None:
    models = (
        ServedModel("gpu", EngineOptions(model_path="/w/a.gguf")),
        ServedModel("cpu", EngineOptions(model_path="/w/a.gguf", gpu_layers=0)),
    )
    write_repository(tmp_path, models, has_gpu=True)
    configs = {name: (tmp_path / name / "config.pbtxt").read_text() for name in ("gpu", "cpu")}
    assert "instance_group [ { count: 1 kind: KIND_GPU gpus: [ 0 ] } ]" in configs["gpu"]
    assert "instance_group [ { count: 1 kind: KIND_CPU } ]" in configs["cpu"]


def test_environment_is_what_set_up_wrote(tmp_path: Path) -> None:
    """Its bin comes first on PATH, and no PYTHONPATH is inherited."""
    paths = {name: tmp_path / name for name in ("tritonserver", "backends", "lib")}
    for path in paths.values():
        path.mkdir()
    description = {
        "server": str(paths["tritonserver"]),
        "backend_directory": str(paths["backends"]),
        "library_path": [str(paths["lib"])],
        "path": "/env/bin",
    }
    (tmp_path / "triton.json").write_bytes(msgspec.json.encode(description))
    environment = find_environment(tmp_path)
    environ = environment.environ({"PATH": "/usr/bin", "PYTHONPATH": "/elsewhere", "LD_LIBRARY_PATH": "/x"})
    assert environ["PATH"] == "/env/bin:/usr/bin"
    assert environ["LD_LIBRARY_PATH"] == f"{paths['lib']}:/x"
    assert "PYTHONPATH" not in environ
    argv = command(environment, tmp_path, ("m",), Ports(), drain_s=3.0, prefix="p_", key="k" * 16)
    assert "--load-model=m" in argv
    assert "--model-control-mode=explicit" in argv


def test_error_of_a_missing_environment_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="make setup"):
        find_environment(tmp_path)
    (tmp_path / "triton.json").write_text("{}")
    with pytest.raises(ConfigError, match="make setup"):
        find_environment(tmp_path)
    gone = {"server": "/gone", "backend_directory": "/gone", "library_path": [], "path": "/gone"}
    (tmp_path / "triton.json").write_bytes(msgspec.json.encode(gone))
    with pytest.raises(ConfigError, match="/gone does not exist"):
        find_environment(tmp_path)


def test_texts_that_may_quote_a_request_are_hidden() -> None:
    """Of what a model raises the log has class and source lines, of a grammar that llama.cpp refuses nothing."""
    secret = "zebra-7f3a"
    lines = [
        f'E1122 10:00:00.1 7 pb_stub.cc:749] "Failed to process the request(s), message: ValueError: {secret}',
        f"more of {secret}",
        "At:",
        "  /models/m/1/model.py(12): execute",
        'I1122 10:00:01.000001 7 server.cc:12] "fine again"',
        "the engine stopped",
        "Traceback (most recent call last):",
        '  File "/app/engine.py", line 7, in _run',
        "    self._serve()",
        f"causeway_server.router.errors.InvalidGrammar: {secret}",
        f"KeyError: '{secret}'",
        f"  of {secret}",
        "GGML_ASSERT(n > 0) failed",
        'I1122 10:00:01.000001 7 server.cc:12] "fine again"',
        "GGML_ASSERT(n > 0) failed",
        "parse: error parsing grammar: expecting name at " + secret,
        f'root ::= "{secret}"',
    ]
    log_filter = LogFilter(lambda: True)
    shown = [text for line in lines if (text := log_filter.readable(line)) is not None]
    assert not [text for text in shown if secret in text]
    assert shown == [
        "error: Failed to process the request(s), message: ValueError",
        "  /models/m/1/model.py(12): execute",
        "fine again",
        "the engine stopped",
        "Traceback (most recent call last):",
        '  File "/app/engine.py", line 7, in _run',
        "    self._serve()",
        "causeway_server.router.errors.InvalidGrammar",
        "KeyError",
        "fine again",
        "GGML_ASSERT(n > 0) failed",
        "parse: error parsing grammar",
    ]
