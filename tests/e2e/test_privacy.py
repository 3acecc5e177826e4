"""Requests bound to the device stay there, whatever fails: the connection to the cloud is tapped."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import openai
import psutil
import pytest

from tests.ports import free_port
from tests.stack import Stack

from .requests import LONG, LONG_ANSWER, OUTSIDE, SHORT, ask, read, record, stream

pytestmark = pytest.mark.engine
ONLY = {"x-causeway-prefer": "only_on_device"}
PRIVATE = {"x-causeway-tags": "private"}


class Tap:
    """Listens in place of the cloud, keeps every byte that arrives, and answers only 503."""

    def __init__(self) -> None:
        self.port = free_port()
        self.received = bytearray()
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = self._listener.accept()
                threading.Thread(target=self._receive, args=(peer,), daemon=True).start()

    def _receive(self, peer: socket.socket) -> None:
        with peer, contextlib.suppress(OSError):
            while data := peer.recv(65536):
                self.received += data
                if b"\r\n\r\n" in data:
                    peer.sendall(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n")

    def close(self) -> None:
        self._listener.close()


@pytest.fixture(scope="module")
def tapped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, Tap]]:
    stack, tap = Stack(tmp_path_factory.mktemp("tapped")), Tap()
    stack.start_edge(cloud_port=tap.port).ready()
    stack.wait_until_loaded()
    yield stack, tap
    stack.close()
    tap.close()


@pytest.mark.parametrize("headers", [ONLY, PRIVATE], ids=["only_on_device", "private"])
@pytest.mark.parametrize("text", [SHORT, OUTSIDE, LONG], ids=["short", "outside", "long"])
def test_no_request_leaves_the_device(tapped: tuple[Stack, Tap], headers: dict[str, str], text: str) -> None:
    """Short, long or outside the device model's domain."""
    stack, tap = tapped
    answer = ask(stack.edge_url, text, headers=headers, temperature=0.3)
    assert answer.route == "edge"
    assert b"POST" not in tap.received


def test_a_cloud_target_is_rejected_for_a_private_request(tapped: tuple[Stack, Tap]) -> None:
    """The error of a private request for a cloud target names the constraint."""
    stack, tap = tapped
    with pytest.raises(openai.InternalServerError, match="private-stays"):
        ask(stack.edge_url, SHORT, model="large", headers=PRIVATE)
    assert b"POST" not in tap.received


def test_with_the_engine_killed_a_private_request_fails_closed(tapped: tuple[Stack, Tap]) -> None:
    """The client gets an error, and the cloud gets nothing."""
    stack, tap = tapped
    chunks = stream(stack.edge_url, SHORT, extra_headers=PRIVATE, **LONG_ANSWER)
    with pytest.raises(openai.APIError):
        list(read(chunks, after=2, do=lambda: _kill_engine(stack)))
    assert b"POST" not in tap.received
    answer = ask(stack.edge_url, SHORT, headers=PRIVATE)
    assert answer.route == "edge"


def test_the_tap_receives_requests_that_may_leave(tapped: tuple[Stack, Tap]) -> None:
    """Shows that the tap works: an unconstrained request reaches it, and falls back to the device."""
    stack, tap = tapped
    answer = ask(stack.edge_url, LONG, temperature=0.4)
    assert b"POST /v1/chat/completions" in tap.received
    assert b"exchange rate" in tap.received
    assert (answer.route, answer.degraded) == ("edge", True)
    attempts = record(stack.edge_url, answer.id)["outcome"]["attempts"]
    assert [attempt["target"] for attempt in attempts] == ["large", "small"]


def test_a_private_answer_is_never_written_to_disk(tapped: tuple[Stack, Tap]) -> None:
    """It is cached in memory only: no file holds the prompt or the answer."""
    stack, _ = tapped
    ask(stack.edge_url, "add marzipan to my shopping list", headers=PRIVATE, temperature=0)
    again = ask(stack.edge_url, "add marzipan to my shopping list", headers=PRIVATE, temperature=0)
    assert again.cache == "hit"
    files = [path for path in Path(stack.folder).rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if b"marzipan" in path.read_bytes()]


def _kill_engine(stack: Stack) -> None:
    for child in psutil.Process(stack.parts["edge"].popen.pid).children(recursive=True):
        child.kill()
