"""An upstream that answers each POST with the bytes that a test gives it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket

from .scripted import ScriptedCloud

_MODELS = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 27\r\n\r\n{"object":"list","data":[]}'


class RawUpstream(ScriptedCloud):
    """`replies`: the bytes of the responses, in order; the last one is repeated. Each ends with its connection, which
    an upstream that `stalls` keeps open until the client closes it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.replies: list[bytes] = []
        self.stalls = False
        self._server: asyncio.Server | None = None

    async def start(self, port: int = 0, sock: socket.socket | None = None) -> RawUpstream:
        """Listen on a port of 127.0.0.1."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", port)
        self.port = int(self._server.sockets[0].getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}/v1"
        return self

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            if head.startswith("get "):
                writer.write(_MODELS)
            else:
                length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
                self.bodies.append(json.loads(await reader.readexactly(length)))
                writer.write(self.replies[min(len(self.bodies), len(self.replies)) - 1])
            await writer.drain()
            if self.stalls and not head.startswith("get "):
                self.running += 1
                await reader.read()
                self.running -= 1
        writer.close()


def reply(
    body: bytes, *, status: str = "200 OK", media_type: str = "application/json", headers: tuple[str, ...] = ()
) -> bytes:
    """Return a response that ends with its connection."""
    lines = [f"HTTP/1.1 {status}", f"Content-Type: {media_type}", "Connection: close", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def events(*datas: object, end: bytes = b"data: [DONE]\n\n", media_type: str = "text/event-stream") -> bytes:
    """Return a streamed response: an event for each value, or the bytes as they are."""
    body = b"".join(
        data if isinstance(data, bytes) else b"data: " + json.dumps(data).encode() + b"\n\n" for data in datas
    )
    return reply(body + end, media_type=media_type)


def delta(content: object = None, finish: object = None, **fields: object) -> dict[str, object]:
    """Return an event of one choice."""
    inner = {**({} if content is None else {"content": content}), **fields}
    return {
        "id": "x",
        "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": inner, "finish_reason": finish}],
    }


def whole(content: object = "hi", finish: object = "stop", **fields: object) -> dict[str, object]:
    """Return a whole answer of one choice."""
    message = {"role": "assistant", "content": content, **fields}
    return {
        "id": "x",
        "object": "chat.completion",
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
    }


def document(value: object, **how: object) -> bytes:
    """Return a whole response."""
    return reply(json.dumps(value).encode(), **how)  # type: ignore[arg-type]


def call(name: str | None = None, arguments: object = None, **fields: object) -> dict[str, object]:
    """Return a tool call, or a piece of one."""
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    return {"type": "function", "function": function, **fields}
