"""What must stay on the device stays there, whatever fails: the wire to the cloud is tapped."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import openai
import psutil
import pytest

from tests.stack import Stack, free_port

from .asking import ENDLESS, LONG, OUTSIDE, SHORT, ask, read, record, stream

pytestmark = pytest.mark.engine
ONLY = {"x-causeway-prefer": "only_on_device"}
PRIVATE = {"x-causeway-tags": "private"}


class Tap:
    """Stands where the cloud stands, keeps every byte that arrives, and never answers but with 503."""

    def __init__(self) -> None:
        self.port = free_port()
        self.heard = bytearray()
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = self._listener.accept()
                threading.Thread(target=self._hear, args=(peer,), daemon=True).start()

    def _hear(self, peer: socket.socket) -> None:
        with peer, contextlib.suppress(OSError):
            while data := peer.recv(65536):
                self.heard += data
                if b"\r\n\r\n" in data:
                    peer.sendall(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n")

    def close(self) -> None:
        self._listener.close()


@pytest.fixture(scope="module")
def tapped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, Tap]]:
    stack, tap = Stack(tmp_path_factory.mktemp("tapped")), Tap()
    stack.start_edge(cloud_port=tap.port).ready()
    stack.settle()
    yield stack, tap
    stack.close()
    tap.close()


@pytest.mark.parametrize("headers", [ONLY, PRIVATE], ids=["only_on_device", "private"])
@pytest.mark.parametrize("text", [SHORT, OUTSIDE, LONG], ids=["short", "outside", "long"])
def test_nothing_leaves(tapped: tuple[Stack, Tap], headers: dict[str, str], text: str) -> None:
    """Short, long or outside the device's domain: answered on the device, and no request goes out."""
    stack, tap = tapped
    asked = ask(stack.edge_url, text, headers=headers, temperature=0.3)
    assert asked.route == "edge"
    assert b"POST" not in tap.heard


def test_a_named_cloud_model_is_refused(tapped: tuple[Stack, Tap]) -> None:
    """Asking for the cloud by name with a private tag is an error that names the constraint, not an answer."""
    stack, tap = tapped
    with pytest.raises(openai.InternalServerError, match="private-stays"):
        ask(stack.edge_url, SHORT, model="large", headers=PRIVATE)
    assert b"POST" not in tap.heard


def test_with_the_engine_dead_it_fails_closed(tapped: tuple[Stack, Tap]) -> None:
    """The engine is killed while it answers a private ask: the caller gets an error, the cloud gets nothing."""
    stack, tap = tapped
    chunks = stream(stack.edge_url, SHORT, extra_headers=PRIVATE, **ENDLESS)
    with pytest.raises(openai.APIError):
        list(read(chunks, after=2, do=lambda: _kill_engine(stack)))
    assert b"POST" not in tap.heard
    asked = ask(stack.edge_url, SHORT, headers=PRIVATE)
    assert asked.route == "edge"


def test_the_tap_hears_what_may_leave(tapped: tuple[Stack, Tap]) -> None:
    """The watch itself works: an ask without constraint does reach the wire (and falls back to the device)."""
    stack, tap = tapped
    asked = ask(stack.edge_url, LONG, temperature=0.4)
    assert b"POST /v1/chat/completions" in tap.heard
    assert b"exchange rate" in tap.heard
    assert (asked.route, asked.degraded) == ("edge", True)
    told = record(stack.edge_url, asked.id)["outcome"]["attempts"]
    assert [a["target"] for a in told] == ["large", "small"]


def test_a_private_answer_is_not_written_down(tapped: tuple[Stack, Tap]) -> None:
    """Cached in memory at most: neither ask nor answer is found in any file of the state folder."""
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
