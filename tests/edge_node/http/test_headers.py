"""The tables of headers match the code and the running daemon."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from causeway_server.edge_node.openapi import REQUEST_HEADERS, RESPONSE_HEADERS

from ..device import running

ROOMS = [Path(__file__).parents[3] / "edge_node" / room for room in ("http", "jobs")]
SOURCES = [path for room in ROOMS for path in room.glob("*.py") if path.stem != "headers"]
SOURCES += (Path(__file__).parents[3] / "router" / "serving").glob("*.py")
SOURCES.append(Path(__file__).parents[3] / "edge_node" / "backends" / "cloud" / "history.py")  # a client's key


def test_every_causeway_header_in_the_code_has_a_meaning() -> None:
    used = {name for path in SOURCES for name in re.findall(r"\bx-causeway-[a-z-]*[a-z]", path.read_text())}
    assert used == {name for name in (*REQUEST_HEADERS, *RESPONSE_HEADERS) if name.startswith("x-causeway-")}


async def test_every_response_header_of_an_answer_has_a_meaning(tmp_path: Path) -> None:
    async with running(tmp_path) as device:
        sent = {name.lower() for name in (await device.ask()).headers}
    sent.add("x-causeway-modalities")  # only of a request with audio or images: tests/models/parts
    sent.add("x-causeway-variant")  # only of a target with variants: tests/edge_node/serving
    sent.add("x-causeway-session")  # only under a policy with `session`: tests/edge_node/serving
    sent.add("x-causeway-trimmed")  # only of a chat that exceeds the context: tests/edge_node/serving
    sent.add("x-causeway-loosened")  # only of a request with tools that cannot be held: tests/conformance
    assert {name for name in sent if name.startswith("x-")} == {name for name in RESPONSE_HEADERS if name[:2] == "x-"}


def _post(body: bytes) -> bytes:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


CHAT = b'{"model":"auto","messages":[{"role":"user","content":"hello"}]%b}'
UPGRADE = b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: " + b"A" * 22
REQUESTS = {
    "answer": (_post(CHAT % b""), 200),
    "stream": (_post(CHAT % b',"stream":true'), 200),
    "bad request": (_post(b"{}"), 400),
    "health": (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", 200),
    "metrics": (b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", 200),
    "no such path": (b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
    "no such job": (b"GET /v1/jobs/nothing HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
    "console": (b"GET /console HTTP/1.1\r\nHost: localhost\r\n\r\n", 200),
    "live session": (b"GET /v1/realtime?model=auto HTTP/1.1\r\nHost: localhost\r\n" + UPGRADE + b"==\r\n\r\n", 101),
    "no HTTP": (b"hello\r\n\r\n", 400),
}


@pytest.mark.parametrize("name", REQUESTS)
async def test_no_response_names_versions_of_software(tmp_path: Path, name: str) -> None:
    sent, expected = REQUESTS[name]
    async with running(tmp_path) as device:
        reader, writer = await asyncio.open_connection("127.0.0.1", device.app.port)
        writer.write(sent)
        status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        writer.close()
    fields = dict(line.lower().split(": ", 1) for line in lines)
    assert (int(status.split()[1]), fields["server"]) == (expected, "causeway")
