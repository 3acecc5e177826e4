"""The child process over a real socketpair: it answers, and it exits when it should."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from causeway_server.models.llama_cpp import protocol
from causeway_server.models.llama_cpp.process.child import EXIT_ENGINE_FAILED, EXIT_PROTOCOL_ERROR
from causeway_server.models.llama_cpp.protocol import EngineOptions, Prompt, SequenceRequest
from causeway_server.router.types import Sampling

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[4]
TIMEOUT_S = 60


class Link:
    """The daemon's end of a child."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(TIMEOUT_S)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "causeway_server.models.llama_cpp.process.child", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
            cwd=ROOT,
        )
        theirs.close()
        self._reader = protocol.FrameReader(protocol.CHILD_MESSAGES)
        self._received: list[protocol.ChildMessage] = []

    def send(self, message: protocol.DaemonMessage) -> None:
        self.socket.sendall(protocol.encode(message))

    def next(self) -> protocol.ChildMessage:
        while not self._received:
            data = self.socket.recv(65536)
            assert data, "the child closed the link"
            self._received += self._reader.feed(data)
        return self._received.pop(0)

    def end(self) -> tuple[int, str]:
        """Wait for the exit; return the status and stderr."""
        _, stderr = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode, stderr.decode()


@pytest.fixture
def link() -> Iterator[Link]:
    link = Link()
    yield link
    link.socket.close()
    link.process.kill()
    link.process.communicate()


@pytest.fixture
def ready(link: Link, tiny_options: EngineOptions) -> Link:
    link.send(protocol.Load(tiny_options))
    assert isinstance(link.next(), protocol.Ready)
    return link


def job(number: int, text: str = "hello", **fields: object) -> SequenceRequest:
    greedy = Sampling(temperature=0.0)
    return SequenceRequest(id=number, prompt=Prompt(text=text), sampling=greedy, ignore_eos=True, **fields)  # type: ignore[arg-type]


def until_end(link: Link, number: int) -> list[protocol.Step]:
    steps: list[protocol.Step] = []
    while not any(e.job == number and (e.finish_reason or e.error) for step in steps for e in step.emissions):
        message = link.next()
        assert isinstance(message, protocol.Step)
        steps.append(message)
    return steps


def test_one_frame_carries_every_token_of_a_step(ready: Link) -> None:
    ready.send(protocol.Submit((job(1, max_tokens=20), job(2, max_tokens=20))))
    steps = until_end(ready, 2)
    assert any({e.job for e in step.emissions} == {1, 2} for step in steps)


def test_counting_and_stats_are_answered_while_it_decodes(ready: Link) -> None:
    """A prompt that cannot be counted says why."""
    requests = (protocol.Count(7, Prompt(text="hello world")), protocol.Count(8, Prompt(text="")), protocol.Ping())
    together = b"".join(
        bytes(protocol.encode(message)) for message in (protocol.Submit((job(1, max_tokens=None),)), *requests)
    )
    ready.socket.sendall(together)
    others: list[protocol.ChildMessage] = []
    while len(others) < 3:
        message = ready.next()
        if isinstance(message, protocol.Step):
            assert not any(e.finish_reason for e in message.emissions)
        else:
            others.append(message)
    empty = protocol.Counted(8, -1, error="invalid_value", detail="The prompt is empty.", param="prompt")
    assert others[:2] == [protocol.Counted(7, 2), empty]
    assert isinstance(others[2], protocol.Pong)
    assert others[2].stats.kv_total > 0


def test_a_model_that_cannot_be_loaded_is_reported_and_ends_the_child(link: Link, tmp_path: Path) -> None:
    """The reason is a message, not a traceback on stderr."""
    link.send(protocol.Load(EngineOptions(model_path=str(tmp_path / "no.gguf"))))
    failed = link.next()
    assert isinstance(failed, protocol.Failed)
    assert (failed.code, failed.detail) == ("engine_unavailable", f"{tmp_path / 'no.gguf'}: No such file or directory")
    status, stderr = link.end()
    assert (status, stderr) == (EXIT_ENGINE_FAILED, "")


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100, b"\x01\x00\x00\x00\xc1"])
def test_garbage_ends_the_child(ready: Link, garbage: bytes) -> None:
    ready.socket.sendall(garbage)
    status, stderr = ready.end()
    assert status == EXIT_PROTOCOL_ERROR
    assert "invalid message" in stderr


def test_a_request_before_load_ends_the_child(link: Link) -> None:
    link.send(protocol.Ping())
    assert link.end()[0] == EXIT_ENGINE_FAILED


@pytest.mark.parametrize("busy", [False, True])
def test_the_child_exits_when_the_link_closes(ready: Link, busy: bool) -> None:
    """Idle or in the middle of an answer."""
    if busy:
        ready.send(protocol.Submit((job(1, max_tokens=None),)))
        ready.next()
    ready.socket.close()
    assert ready.end() == (0, "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_to_the_process_group_do_not_end_it(ready: Link, number: signal.Signals) -> None:
    """Ctrl-C and a service manager's stop reach the child too; the daemon drains first."""
    ready.process.send_signal(number)
    ready.send(protocol.Submit((job(1, max_tokens=3),)))
    assert until_end(ready, 1)


def test_loading_is_quiet(ready: Link) -> None:
    """llama.cpp's log does not reach the daemon's stderr."""
    ready.socket.close()
    assert ready.end()[1] == ""
