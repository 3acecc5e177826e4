"""A link between a device and a broker, which can be cut, and lose what the device says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Relay:
    """Forwards bytes to `target`. `mute`: what the device says is lost. `silent`: so is what the broker says."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0
        self.mute = False
        self.silent = False

    def cut(self) -> None:
        """Close all connections."""
        for writer in self._writers:
            writer.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            broker_reader, broker_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        self._writers |= {writer, broker_writer}
        with contextlib.suppress(OSError):
            await asyncio.gather(
                self._copy(reader, broker_writer, said_by_device=True),
                self._copy(broker_reader, writer, said_by_device=False),
            )

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, said_by_device: bool) -> None:
        try:
            while data := await reader.read(65536):
                if not (self.mute if said_by_device else self.silent):
                    writer.write(data)
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def relay_to(port: int) -> AsyncIterator[Relay]:
    relay = Relay(port)
    server = await asyncio.start_server(relay.serve, "127.0.0.1", 0)
    relay.port = server.sockets[0].getsockname()[1]
    try:
        yield relay
    finally:
        server.close()
        relay.cut()
