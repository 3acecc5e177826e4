"""`up` with fake programs: order of start and stop, faults, the table, and no leftovers."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from causeway_server.edge_node.cli.up.models import KNOWLEDGE, TOUR, StartedModels, Vllm, VllmDescription, choose_models
from causeway_server.edge_node.cli.up.session import UpOptions, find_programs
from causeway_server.edge_node.config.loader import load_config
from causeway_server.edge_node.config.schema import Config, ServerConfig
from tests.ports import free_port

pytestmark = pytest.mark.slow

FAKE = Path(__file__).parent / "programs.py"
ROOT = Path(__file__).parents[3]
# `up` runs as a process, because signals end it.
MAIN = """
import sys, msgspec
from pathlib import Path
from causeway_server.edge_node.cli.up.session import UpOptions, run
sys.exit(run(msgspec.json.decode(sys.argv[1], type=UpOptions, dec_hook=lambda kind, value: kind(value))))
"""


class UpProcess:
    """One run of `up` with fake programs."""

    def __init__(self, folder: Path, *faults: str, **options: object) -> None:
        self.folder = folder
        (folder / "faults").write_text("\n".join(faults))
        (folder / "events").touch()
        environ = {"FAKE_FAULTS": str(folder / "faults"), "FAKE_EVENTS": str(folder / "events"), "COLUMNS": "200"}
        programs = {name: [sys.executable, str(FAKE), name] for name in ("causeway-edge", "causeway-cloud")}
        config = options.pop("config", Config(server=ServerConfig(port=0, drain_s=0.0)))
        models = options.pop("models", StartedModels("", ("assistant-large",), (), TOUR))
        parts = {"config": config, "serve_flags": [], "models": models, "programs": programs}
        document = {**parts, "runs": str(folder / "runs"), **options}
        self.process = subprocess.Popen(
            [sys.executable, "-c", MAIN, msgspec.json.encode(document).decode()],
            env={**os.environ, **environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.printed = ""
        self._watchdog = threading.Timer(60, self.process.kill)  # ends a reader that would wait for ever
        self._watchdog.start()

    def until(self, text: str) -> None:
        """Read the output until it contains `text`."""
        assert self.process.stdout is not None
        while text not in self.printed:
            line = self.process.stdout.readline()
            assert line, f"ended without saying {text!r}:\n{self.printed}"
            self.printed += line

    def end(self, *signals: signal.Signals) -> int:
        """Send the signals, read the remaining output, and return the exit status."""
        for number in signals:
            self.process.send_signal(number)
        rest, _ = self.process.communicate(timeout=60)
        self.printed += rest
        self._watchdog.cancel()
        return self.process.returncode

    def clear(self) -> None:
        """Kill what a failed test has left behind."""
        self._watchdog.cancel()
        if self.process.poll() is None:
            for child in [psutil.Process(self.process.pid), *self.children()]:
                child.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def crash(self, name: str) -> None:
        """Let one of the programs die once all have started."""
        self.until("Ctrl-C")
        os.kill(int((self.folder / f"{name}.pid").read_text()), signal.SIGUSR1)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    @property
    def events(self) -> list[str]:
        return (self.folder / "events").read_text().splitlines()

    def run_folder(self) -> Path:
        (found,) = (self.folder / "runs").iterdir()
        return found


Start = Callable[..., UpProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[UpProcess] = []

    def begin(*faults: str, **options: object) -> UpProcess:
        started.append(UpProcess(tmp_path, *faults, **options))
        return started[-1]

    yield begin
    for running in started:
        running.clear()


def test_once_starts_asks_prints_and_leaves_only_logs(start: Start) -> None:
    """The programs stop in reverse order, and the secrets are deleted."""
    up = start(once=True)
    assert up.end() == 0
    order = [event for event in up.events if event.endswith((" starts", " ends"))]
    assert set(order[:2]) == {"triton starts", "gateway starts"}
    assert order[2:] == ["edge starts", "edge ends", "gateway ends", "triton ends"]
    assert [event for event in up.events if event.startswith("request")] == [
        f"request {question.text[:20]} {list(question.tags)}" for question in TOUR
    ]
    for text in ("question", "route", "first ms", "wake me up at six am", "an answer", "fast-path", "edge"):
        assert text in up.printed
    names = {path.name for path in up.run_folder().iterdir()}
    assert names == {"triton.log", "gateway.log", "edge.log"}


def test_the_gateway_and_the_edge_share_a_token_of_this_run(start: Start) -> None:
    """The gateway gets the hash, the edge the token, both from files."""
    up = start(once=True)
    assert up.end() == 0
    (tokens,) = [event for event in up.events if event.startswith("tokens")]
    (key,) = [event for event in up.events if event.startswith("key")]
    token, url = key.split()[1], key.split()[3]
    digest = hashlib.sha256(token.encode()).hexdigest()
    assert tokens == f"tokens this-device sha256:{digest} priority=interactive critical=true"
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/v1", url)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_it_serves_until_a_signal(start: Start, number: signal.Signals) -> None:
    """The programs stop in order, and the exit code is 0."""
    up = start()
    up.until("Ctrl-C")
    children = up.children()
    assert len(children) == 3
    assert "curl http://127.0.0.1:" in up.printed
    assert "base_url=" in up.printed
    assert up.end(number) == 0
    assert up.events[-3:] == ["edge ends", "gateway ends", "triton ends"]
    assert not any(child.is_running() for child in children)


def with_vllm(port: int) -> StartedModels:
    description = VllmDescription((sys.executable, str(FAKE), "vllm"), {"VLLM_NO_USAGE_STATS": "1"}, "tiny")
    return StartedModels("", (), (), TOUR, "tiers: []\n", vllm=Vllm(description, port))


def test_a_vllm_stands_where_triton_stands(start: Start) -> None:
    """The gateway starts once it has made a token, since it asks it for its features."""
    up = start(once=True, models=with_vllm(free_port()))
    assert up.end() == 0
    order = [event for event in up.events if event.endswith((" starts", " token", " ends"))]
    assert order == ["vllm starts", "vllm is asked for 1 token", "gateway starts", "edge starts"] + [
        f"{name} ends" for name in ("edge", "gateway", "vllm")
    ]
    assert "vllm     ready after" in up.printed


def test_a_program_that_is_not_there_is_named(start: Start) -> None:
    """After the set-up was removed, say."""
    models = msgspec.structs.replace(with_vllm(free_port()), vllm=Vllm(VllmDescription(("/no/python",), {}, "m"), 1))
    up = start(once=True, models=models)
    assert up.end() == 1
    assert "vllm cannot be started: [Errno 2] No such file or directory: '/no/python'" in up.printed
    assert "`make run UPSTREAM=vllm`" in up.printed


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("vllm-missing", "vllm does not become ready"),
        ("vllm-refuses", r'vllm refuses http://\S+/chat/completions: {"error": "no such model"}'),
    ],
)
def test_a_vllm_that_cannot_start_is_named(start: Start, fault: str, words: str) -> None:
    up = start(fault, once=True, models=with_vllm(free_port()))
    assert up.end() == 1
    assert re.search(words, up.printed)
    assert not any(event.startswith(("gateway", "edge")) for event in up.events)


def test_with_no_cloud_only_the_edge_is_started(start: Start) -> None:
    up = start(cloud=False, once=True)
    assert up.end() == 0
    assert [event for event in up.events if event.endswith("starts")] == ["edge starts"]


@pytest.mark.parametrize("name", ["triton", "gateway", "edge"])
def test_a_program_that_cannot_start_is_named_with_the_end_of_its_log(start: Start, name: str) -> None:
    """The other programs are stopped, and the exit code is 1."""
    up = start(f"{name}-missing", once=True)
    assert up.end() == 1
    assert f"{name} ended (status 1)" in up.printed
    assert f"{name}: `make setup` makes its environment" in up.printed
    started = {event.split()[0] for event in up.events if event.endswith("starts")}
    ended = {event.split()[0] for event in up.events if event.endswith("ends")}
    assert started == ended


@pytest.mark.parametrize("name", ["triton", "gateway"])
def test_the_edge_continues_after_a_cloud_program_died(start: Start, name: str) -> None:
    """The output names the program and shows the end of its log."""
    up = start()
    up.crash(name)
    up.until("the edge continues without it")
    assert f"{name} ended unexpectedly" in up.printed
    assert f"{name}: simulated crash" in up.printed
    assert up.end(signal.SIGINT) == 0
    assert "edge ends" in up.events


def test_what_a_dead_program_left_behind_is_ended(start: Start) -> None:
    """A killed vLLM leaves its engine, which holds the pipe of its output open."""
    up = start("vllm-has-engine", models=with_vllm(free_port()))
    up.crash("vllm")
    up.until("the edge continues without it")
    (engine,) = [int(event.split()[1]) for event in up.events if event.startswith("engine-pid")]
    assert up.end(signal.SIGINT) == 0
    with contextlib.suppress(psutil.NoSuchProcess):
        assert psutil.Process(engine).status() == psutil.STATUS_ZOMBIE


def test_the_death_of_the_edge_ends_everything(start: Start) -> None:
    """The exit code is 1, and the cloud programs are stopped too."""
    up = start()
    up.crash("edge")
    assert up.end() == 1
    assert "edge ended unexpectedly" in up.printed
    assert up.events[-2:] == ["gateway ends", "triton ends"]


def test_ctrl_c_during_the_start_stops_what_was_started(start: Start) -> None:
    """The exit code is 130, as for any interrupted program."""
    up = start("triton-silent")
    up.until("logs in")
    while "gateway starts" not in up.events or "triton starts" not in up.events:
        assert up.process.poll() is None
    assert up.end(signal.SIGINT) == 130
    assert "triton ends" in up.events


def test_a_second_ctrl_c_kills(start: Start) -> None:
    """Even a program that ignores SIGTERM."""
    up = start("edge-stubborn")
    up.until("Ctrl-C")
    children = up.children()
    up.process.send_signal(signal.SIGINT)
    up.until("draining")
    assert up.end(signal.SIGINT) == 0
    assert not any(child.is_running() for child in children)


def test_if_up_is_killed_its_programs_end(start: Start) -> None:
    """The kernel sends each of them SIGTERM."""
    up = start()
    up.until("Ctrl-C")
    children = up.children()
    up.process.kill()
    up.process.wait()
    gone, alive = psutil.wait_procs(children, timeout=60)
    assert (len(gone), alive) == (3, [])


def test_failed_questions_are_printed_and_are_exit_code_1(start: Start) -> None:
    up = start("refuses", once=True)
    assert up.end() == 1
    assert up.printed.count("503 no_route: no route") == len(TOUR)


def test_the_questions_wait_for_the_engine(start: Start) -> None:
    """The edge is ready as soon as the cloud can answer; the demo questions also need the device."""
    up = start(cloud=False, once=True)
    assert up.end() == 0
    states = [event for event in up.events if event.startswith(("engine", "request"))]
    assert states[:3] == ["engine starting", "engine starting", "engine ready"]
    assert states[3].startswith("request")


def test_a_failed_engine_is_reported_and_not_waited_for(start: Start) -> None:
    """The questions are asked all the same."""
    up = start("engine-fails", cloud=False, once=True)
    assert up.end() == 0
    assert "the device's engine is failed: see" in up.printed


def test_a_taken_port_is_replaced_by_the_next_free_one(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        up = start(cloud=False, once=True, config=Config(server=ServerConfig(port=port, drain_s=0.0)))
        assert up.end() == 0
    assert f"port {port} is in use: the edge listens on" in up.printed


def test_only_the_newest_runs_are_kept(start: Start, tmp_path: Path) -> None:
    """Other folders are not deleted."""
    for number in range(8):
        (tmp_path / "runs" / f"2020010{number}-000000-1").mkdir(parents=True)
    (tmp_path / "runs" / "mine").mkdir()
    assert start(cloud=False, once=True).end() == 0
    names = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert names[:4] == [f"2020010{number}-000000-1" for number in (4, 5, 6, 7)]
    assert names[-1] == "mine"
    assert len(names) == 6


def test_every_program_gets_the_models_and_the_policy_of_the_run(start: Start) -> None:
    """The policy lies in the run's folder."""
    models = StartedModels("version: 1\n", ("one", "two"), ("/models",), KNOWLEDGE, "log: info\n")
    up = start(once=True, models=models)
    assert up.end() == 0
    flags = {name: words for name, *words in (event.split() for event in up.events if " --" in event)}
    folders = ["--model-dir", "/models"]
    assert flags["triton"] == [*folders, "--model", "one", "--model", "two"]
    gateway = up.run_folder() / "gateway.yaml"
    assert flags["gateway"] == [*folders, "--config", str(gateway)]
    assert gateway.read_text() == models.gateway_text
    policy = up.run_folder() / "policy.yaml"
    assert flags["edge"] == ["--policy", str(policy)]
    assert policy.read_text() == models.policy_text
    assert len([event for event in up.events if event.startswith("request")]) == len(KNOWLEDGE)


def test_the_commands_are_found_beside_python_or_as_modules() -> None:
    programs = find_programs()
    assert set(programs) == {"causeway-edge", "causeway-cloud"}
    for name, package in (("causeway-edge", "edge_node"), ("causeway-cloud", "cloud_pool")):
        module = [sys.executable, "-P", "-m", f"causeway_server.{package}"]
        assert programs[name][0].endswith(name) or programs[name] == module


def test_cloud_is_on_and_once_is_off_by_default() -> None:
    config = load_config(None, {"HOME": "/h"}, {})
    models = choose_models(config, None, None, with_cloud=True)
    options = UpOptions(config, ("--log", "debug"), Path("/runs"), find_programs(), models)
    assert (options.cloud, options.once) == (True, False)
