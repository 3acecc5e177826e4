"""`up` with stand-ins for its three programs: order, faults, the table, and that nothing is left."""

from __future__ import annotations

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

from edge_node.cli.up.resources import find_programs
from edge_node.cli.up.session import UpOptions
from edge_node.cli.up.tour import TOUR
from edge_node.config.schema import Config, ServerConfig, load_config

FAKE = Path(__file__).parent / "programs.py"
ROOT = Path(__file__).parents[2]
# `up` as a process of its own, for it is signals that end it.
MAIN = """
import sys, msgspec
from pathlib import Path
from edge_node.cli.up.session import UpOptions, run
sys.exit(run(msgspec.json.decode(sys.argv[1], type=UpOptions, dec_hook=lambda kind, value: kind(value))))
"""


class Running:
    """One `up` and the world around it."""

    def __init__(self, folder: Path, *faults: str, **plan: object) -> None:
        self.folder = folder
        (folder / "faults").write_text("\n".join(faults))
        (folder / "events").touch()
        environ = {"FAKE_FAULTS": str(folder / "faults"), "FAKE_EVENTS": str(folder / "events"), "COLUMNS": "200"}
        programs = {name: [sys.executable, str(FAKE), name] for name in ("causeway-edge", "causeway-cloud")}
        config = plan.pop("config", Config(server=ServerConfig(port=0, drain_s=0.0)))
        document = {"config": config, "serve_flags": [], "runs": str(folder / "runs"), "programs": programs, **plan}
        self.process = subprocess.Popen(
            [sys.executable, "-c", MAIN, msgspec.json.encode(document).decode()],
            env={**os.environ, **environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.printed = ""
        self._hung = threading.Timer(60, self.process.kill)  # a reader that waits for ever then sees the end
        self._hung.start()

    def until(self, text: str) -> None:
        """Read what it prints until `text` is in it."""
        assert self.process.stdout is not None
        while text not in self.printed:
            line = self.process.stdout.readline()
            assert line, f"ended without saying {text!r}:\n{self.printed}"
            self.printed += line

    def end(self, *signals: signal.Signals) -> int:
        """Send the signals, read the rest, and return the exit status."""
        for number in signals:
            self.process.send_signal(number)
        rest, _ = self.process.communicate(timeout=60)
        self.printed += rest
        self._hung.cancel()
        return self.process.returncode

    def clear(self) -> None:
        """Whatever a failed test has left."""
        self._hung.cancel()
        if self.process.poll() is None:
            for child in [psutil.Process(self.process.pid), *self.children()]:
                child.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    @property
    def events(self) -> list[str]:
        return (self.folder / "events").read_text().splitlines()

    def run_folder(self) -> Path:
        (found,) = (self.folder / "runs").iterdir()
        return found


Start = Callable[..., Running]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Running] = []

    def begin(*faults: str, **plan: object) -> Running:
        started.append(Running(tmp_path, *faults, **plan))
        return started[-1]

    yield begin
    for running in started:
        running.clear()


def test_once_starts_asks_prints_and_leaves_nothing(start: Start) -> None:
    """Started in order, asked each question, ended in the opposite order; the secrets are gone, the logs stay."""
    up = start(once=True)
    assert up.end() == 0
    order = [event for event in up.events if event.endswith((" starts", " ends"))]
    assert set(order[:2]) == {"triton starts", "gateway starts"}
    assert order[2:] == ["edge starts", "edge ends", "gateway ends", "triton ends"]
    assert [event for event in up.events if event.startswith("asked")] == [
        f"asked {question.text[:20]} {list(question.tags)}" for question in TOUR
    ]
    for told in ("question", "route", "first ms", "wake me up at six am", "an answer", "fast-path", "edge"):
        assert told in up.printed
    names = {path.name for path in up.run_folder().iterdir()}
    assert names == {"triton.log", "gateway.log", "edge.log"}


def test_the_gateway_and_the_edge_share_a_token_of_this_run(start: Start) -> None:
    """The gateway gets the hash, the edge the token, both from files."""
    up = start(once=True)
    assert up.end() == 0
    (tokens,) = [event for event in up.events if event.startswith("tokens")]
    (key,) = [event for event in up.events if event.startswith("key")]
    token, url = key.split()[1], key.split()[3]
    assert tokens == f"tokens this-device sha256:{hashlib.sha256(token.encode()).hexdigest()}"
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/v1", url)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_it_serves_until_it_is_told_to_stop(start: Start, number: signal.Signals) -> None:
    """It says where to ask; a signal ends all in order with exit code 0."""
    up = start()
    up.until("Ctrl-C")
    children = up.children()
    assert len(children) == 3
    assert "curl http://127.0.0.1:" in up.printed
    assert "base_url=" in up.printed
    assert up.end(number) == 0
    assert up.events[-3:] == ["edge ends", "gateway ends", "triton ends"]
    assert not any(child.is_running() for child in children)


def test_without_a_cloud_only_the_edge_is_started(start: Start) -> None:
    """`--no-cloud`."""
    up = start(cloud=False, once=True)
    assert up.end() == 0
    assert [event for event in up.events if event.endswith("starts")] == ["edge starts"]


@pytest.mark.parametrize("name", ["triton", "gateway", "edge"])
def test_a_program_that_cannot_start_is_named_with_its_words(start: Start, name: str) -> None:
    """Its last words are shown, the others are ended, and the exit code is 1."""
    up = start(f"{name}-missing", once=True)
    assert up.end() == 1
    assert f"{name} ended (status 1)" in up.printed
    assert f"{name}: `make setup` makes its environment" in up.printed
    started = {event.split()[0] for event in up.events if event.endswith("starts")}
    ended = {event.split()[0] for event in up.events if event.endswith("ends")}
    assert started == ended


@pytest.mark.parametrize("name", ["triton", "gateway"])
def test_the_edge_goes_on_without_a_cloud_that_died(start: Start, name: str) -> None:
    """It is told which one died, with its log's end; Ctrl-C still ends the rest in order."""
    up = start(f"{name}-dies")
    up.until("the edge continues without it")
    assert f"{name} ended unexpectedly" in up.printed
    assert f"{name}: out of luck" in up.printed
    assert up.end(signal.SIGINT) == 0
    assert "edge ends" in up.events


def test_a_dead_edge_ends_it_all(start: Start) -> None:
    """Nobody is there to ask: exit code 1, and the cloud side is ended too."""
    up = start("edge-dies")
    assert up.end() == 1
    assert "edge ended unexpectedly" in up.printed
    assert up.events[-2:] == ["gateway ends", "triton ends"]


def test_ctrl_c_while_it_starts_ends_what_is_there(start: Start) -> None:
    """130, as for any program that was interrupted before it did its work."""
    up = start("triton-silent")
    up.until("logs in")
    while "gateway starts" not in up.events or "triton starts" not in up.events:
        assert up.process.poll() is None
    assert up.end(signal.SIGINT) == 130
    assert "triton ends" in up.events


def test_a_second_ctrl_c_kills(start: Start) -> None:
    """A program that does not listen to SIGTERM is gone at the second asking."""
    up = start("edge-stubborn")
    up.until("Ctrl-C")
    children = up.children()
    up.process.send_signal(signal.SIGINT)
    up.until("draining")
    assert up.end(signal.SIGINT) == 0
    assert not any(child.is_running() for child in children)


def test_when_up_is_killed_its_programs_end_by_themselves(start: Start) -> None:
    """kill -9 of `up` sends each of them SIGTERM."""
    up = start()
    up.until("Ctrl-C")
    children = up.children()
    up.process.kill()
    up.process.wait()
    gone, alive = psutil.wait_procs(children, timeout=20)
    assert (len(gone), alive) == (3, [])


def test_a_refusing_edge_is_shown_and_is_exit_code_1(start: Start) -> None:
    """The table tells the failure of each question."""
    up = start("refuses", once=True)
    assert up.end() == 1
    assert up.printed.count("503 no_route: no route") == len(TOUR)


def test_the_questions_wait_for_the_engine(start: Start) -> None:
    """The edge is ready as soon as the cloud can answer for it; the tour is to show the device too."""
    up = start(cloud=False, once=True)
    assert up.end() == 0
    states = [event for event in up.events if event.startswith(("engine", "asked"))]
    assert states[:3] == ["engine starting", "engine starting", "engine ready"]
    assert states[3].startswith("asked")


def test_an_engine_that_failed_is_said_and_not_waited_for(start: Start) -> None:
    """With the log to see; the questions are asked all the same."""
    up = start("engine-fails", cloud=False, once=True)
    assert up.end() == 0
    assert "the device's engine is failed: see" in up.printed


def test_a_taken_port_makes_it_take_the_next(start: Start) -> None:
    """And says so."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        up = start(cloud=False, once=True, config=Config(server=ServerConfig(port=port, drain_s=0.0)))
        assert up.end() == 0
    assert f"port {port} is taken: the edge listens on" in up.printed


def test_only_a_few_old_runs_are_kept(start: Start, tmp_path: Path) -> None:
    """The newest; what is not a run is not touched."""
    for number in range(8):
        (tmp_path / "runs" / f"2020010{number}-000000-1").mkdir(parents=True)
    (tmp_path / "runs" / "mine").mkdir()
    assert start(cloud=False, once=True).end() == 0
    names = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert names[:4] == [f"2020010{number}-000000-1" for number in (4, 5, 6, 7)]
    assert names[-1] == "mine"
    assert len(names) == 6


def test_the_installed_commands_are_found() -> None:
    """Beside this Python, or as modules."""
    programs = find_programs()
    assert set(programs) == {"causeway-edge", "causeway-cloud"}
    for name, package in (("causeway-edge", "edge_node"), ("causeway-cloud", "cloud_pool")):
        assert programs[name][0].endswith(name) or programs[name] == [sys.executable, "-m", package]


def test_a_plan_is_built_from_the_configuration() -> None:
    """What `serve` would get, `up` hands on."""
    plan = UpOptions(load_config(None, {"HOME": "/h"}, {}), ("--log", "debug"), Path("/runs"), find_programs())
    assert (plan.cloud, plan.once) == (True, False)
