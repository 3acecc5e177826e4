"""A server under test: requests to it as raw bytes, and its replies as raw bytes."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import urllib3

Body = Mapping[str, Any]
JSON_TYPE = "application/json"
EVENT_TYPE = "text/event-stream"
MAX_BODY_BYTES = 200_000
"""The limit of each server under test."""

EXCEPTIONS: Mapping[tuple[str, str], str] = {
    (
        "gateway_to_http",
        "test_an_offered_tool_that_cannot_be_held_is_loosened_and_named",
    ): "tools are enforced by the upstream, whose own headers are not passed on"
}
"""(surface, test function) → why this surface cannot pass this test."""

_POOL = urllib3.PoolManager(num_pools=4, maxsize=4, retries=False, timeout=60.0)


class Reply(msgspec.Struct, frozen=True):
    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes

    @property
    def media_type(self) -> str:
        return self.headers.get("content-type", "").partition(";")[0].strip()

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def text(self) -> str:
        """The text of a whole answer's first choice."""
        choice = self.json["choices"][0]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        return str(text or "")


class Surface(msgspec.Struct, frozen=True):
    """One server and the model that the tests name there.

    `twice`: each POST is sent twice, and the second reply counts; it comes from the cache if the request may use it.
    """

    name: str
    host: str
    port: int
    model: str
    api_key: str
    headers: Mapping[str, str] = {}  # of every request
    twice: bool = False

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}/v1"

    def send(
        self, method: str, path: str, body: bytes | Iterator[bytes] | None = None, headers: Mapping[str, str] = {}
    ) -> Reply:
        """Send exactly these bytes. A header of None is left away; an iterator's pieces are sent as chunks."""
        sent = {"authorization": f"Bearer {self.api_key}", "content-type": JSON_TYPE, **self.headers, **headers}
        reply = _POOL.request(
            method,
            f"http://{self.host}:{self.port}{path}",
            body=body,
            headers={name: value for name, value in sent.items() if value},
            chunked=isinstance(body, Iterator),
        )
        return Reply(reply.status, {name.lower(): value for name, value in reply.headers.items()}, reply.data)

    def get(self, path: str, **headers: str) -> Reply:
        return self.send("GET", path, headers=headers)

    def post(self, path: str, body: Body, headers: Mapping[str, str] = {}) -> Reply:
        encoded = json.dumps(body).encode()
        if self.twice:
            self.send("POST", path, encoded, headers)
        return self.send("POST", path, encoded, headers)

    def chat(self, text: str = "wake me up at six am", /, **fields: Any) -> Reply:
        return self.post("/v1/chat/completions", self.chat_body(text, **fields))

    def complete(self, **fields: Any) -> Reply:
        return self.post("/v1/completions", self.completion_body(**fields))

    def embed(self, **fields: Any) -> Reply:
        return self.post("/v1/embeddings", {"model": self.model, "input": "wake me up at six am"} | fields)

    def chat_body(self, text: str = "wake me up at six am", /, **fields: Any) -> dict[str, Any]:
        """A request for a short greedy answer; `fields` are added or replace its own."""
        messages = [{"role": "user", "content": text}]
        return {"model": self.model, "messages": messages, "temperature": 0, "max_tokens": 24} | fields

    def completion_body(self, **fields: Any) -> dict[str, Any]:
        return {"model": self.model, "prompt": "turn on the", "temperature": 0, "max_tokens": 8} | fields

    def raw(self, request: bytes) -> bytes:
        """Send bytes over a connection of their own and read until the server closes it."""
        with socket.create_connection((self.host, self.port), timeout=60) as connection:
            connection.sendall(request)
            received = b""
            while data := connection.recv(65536):
                received += data
        return received


def events(reply: Reply) -> list[bytes]:
    """The data of each event. Fails unless the body is nothing but `data: …` events, ended by one `[DONE]`."""
    assert reply.status == 200, reply.body
    assert reply.media_type == EVENT_TYPE
    assert reply.body.endswith(b"\n\n")
    found = reply.body.removesuffix(b"\n\n").split(b"\n\n")
    assert all(event.startswith(b"data: ") and b"\n" not in event and b"\r" not in event for event in found)
    data = [event.removeprefix(b"data: ") for event in found]
    assert data.index(b"[DONE]") == len(data) - 1
    return data[:-1]
