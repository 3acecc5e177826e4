"""A WebSocket client that can misbehave: it cuts, stops reading, and sends any frame."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import struct
from collections.abc import Mapping
from typing import Any

Event = dict[str, Any]
TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10
PATIENCE_S = 60.0
SAY_HELLO: Event = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]}


class Refused(Exception):
    """The server answered the handshake with an HTTP error."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(status, body)
        self.status = status
        self.body = body

    @property
    def code(self) -> str:
        return str(json.loads(self.body)["error"]["code"])


class PeerClosed(Exception):
    """The server closed the connection with this code."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code, reason)
        self.code = code
        self.reason = reason


class Peer:
    """One connection; `events` are those that it received."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.events: list[Event] = []

    @classmethod
    async def connect(
        cls, port: int | None, query: str = "model=auto", *, headers: Mapping[str, str] = {}, limit: int = 1 << 16
    ) -> Peer:
        """Raises Refused. `limit`: bytes that are read ahead."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=limit)
        key = base64.b64encode(os.urandom(16)).decode()
        fields = {
            "Host": f"127.0.0.1:{port}",
            "Upgrade": "websocket",
            "Connection": "Upgrade",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": key,
            **headers,
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        writer.write(f"GET /v1/realtime?{query} HTTP/1.1\r\n{lines}\r\n".encode())
        async with asyncio.timeout(PATIENCE_S):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            status = int(head.split()[1])
            if status != 101:
                length = int(head.partition("content-length: ")[2].split()[0])
                body = await reader.readexactly(length)
                writer.close()
                raise Refused(status, body)
        return cls(reader, writer)

    @property
    def session_id(self) -> str:
        return str(self.events[0]["session"]["id"])

    @property
    def last(self) -> int:
        """The sequence number of the last event."""
        return int(self.events[-1]["sequence_number"])

    async def send(self, kind: str, **fields: object) -> None:
        await self.send_frame(TEXT, json.dumps({"type": kind, **fields}).encode())

    async def send_frame(self, opcode: int, payload: bytes, *, masked: bool = True, final: bool = True) -> None:
        size = len(payload)
        head = bytes([0x80 * final | opcode])
        mask_bit = 0x80 * masked
        if size < 126:
            head += bytes([mask_bit | size])
        elif size < 1 << 16:
            head += struct.pack("!BH", mask_bit | 126, size)
        else:
            head += struct.pack("!BQ", mask_bit | 127, size)
        # A mask of zeros is allowed, and leaves the payload as it is.
        await self.send_bytes(head + bytes(4 * masked) + payload)

    async def send_bytes(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def event(self) -> Event:
        """The next event. Raises PeerClosed, or ConnectionError when the connection is cut."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                opcode, payload = await self._frame()
                if opcode == PING:
                    await self.send_frame(PONG, payload)
                elif opcode == CLOSE:
                    raise PeerClosed(int.from_bytes(payload[:2]), payload[2:].decode())
                else:
                    assert opcode == TEXT
                    self.events.append(json.loads(payload))
                    return self.events[-1]

    async def until(self, kind: str) -> list[Event]:
        """The next events up to one of this type."""
        events = [await self.event()]
        while events[-1]["type"] != kind:
            events.append(await self.event())
        return events

    async def closed(self) -> PeerClosed:
        """Read on until the server closes."""
        while True:
            try:
                await self.event()
            except PeerClosed as closed:
                return closed

    async def ask(self, text: str = "hello", **response: object) -> list[Event]:
        """A message of the user, and the events of its answer."""
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
        await self.send("conversation.item.create", item=item)
        await self.send("response.create", **({"response": response} if response else {}))
        return await self.until("response.done")

    async def close(self, code: int = 1000) -> None:
        """Leave as a client does."""
        await self.send_frame(CLOSE, struct.pack("!H", code))
        self._writer.close()

    def cut(self) -> None:
        """Lose the connection."""
        self._writer.transport.abort()

    async def _frame(self) -> tuple[int, bytes]:
        try:
            first, size = await self._reader.readexactly(2)
            if size == 126:
                (size,) = struct.unpack("!H", await self._reader.readexactly(2))
            elif size == 127:
                (size,) = struct.unpack("!Q", await self._reader.readexactly(8))
            return first & 15, await self._reader.readexactly(size)
        except asyncio.IncompleteReadError as cut:
            raise ConnectionResetError("the connection was cut") from cut


def text_of(events: list[Event]) -> str:
    return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")


def done(events: list[Event]) -> Event:
    """The response of `response.done`."""
    response: Event = events[-1]["response"]
    return response
