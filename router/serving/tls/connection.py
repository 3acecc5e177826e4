"""TLS of connections, between a TCP transport and a protocol.

Event loops have such a layer. Theirs drops OpenSSL's alert when a handshake fails, and asks OpenSSL after each record
whether there is another, which costs as much as the record: here that is known from the bytes that are left.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeVar, cast

_RECORD_BYTES: Final = 16 * 1024  # maximum plaintext of a record, and of a read (RFC 8446, 5.1)
_PART_BYTES: Final = 256 * 1024  # maximum plaintext that is encrypted at once
_LINGER_S: Final = 30.0  # maximum time in which the last bytes must leave
_UNSENT_BYTES: Final = 64 * 1024  # maximum unsent bytes of a peer that gets an answer of TLS's own
_Protocol = TypeVar("_Protocol", bound=asyncio.Protocol)


class TlsConnection(asyncio.Transport, asyncio.Protocol):
    """The protocol of a TCP transport, and the transport of another protocol.

    Args:
        new_protocol: Function that makes the other protocol, after the handshake.
        server_name: Name that the server's certificate must have; None: this is the server.

    Attributes:
        handshake: Done when the handshake is; it fails with an OSError.
    """

    def __init__(
        self, new_protocol: Callable[[], asyncio.BaseProtocol], context: ssl.SSLContext, server_name: str | None = None
    ) -> None:
        super().__init__()
        self.handshake: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._new_protocol = new_protocol
        self._protocol: asyncio.Protocol | None = None
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_name is None, server_hostname=server_name
        )
        direct: Any = self._tls._sslobj  # type: ignore[attr-defined]  # noqa: SLF001 - two calls fewer for a record
        self._decrypt, self._encrypt = direct.read, direct.write
        self._is_over = False
        self._drops = False  # whether what still arrives is not read
        self._fault: OSError | None = None

    def fail(self, error: OSError) -> None:
        """End the connection because of a fault, of which the peer gets an alert if OpenSSL has one."""
        if not self._is_over:
            self._is_over = True
            self._fault = error.with_traceback(None)  # whose frames hold the connection
            self._flush()
            self._leave()

    def _leave(self) -> None:
        self._tcp.close()
        if self._tcp.get_write_buffer_size():
            asyncio.get_running_loop().call_later(_LINGER_S, self._tcp.abort)

    # --- the protocol of the TCP transport ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._tcp = cast("asyncio.Transport", transport)
        self._shake()

    def data_received(self, data: bytes) -> None:
        if self._drops:
            return
        self._incoming.write(data)
        if self._protocol is None:
            self._shake()
        else:
            self._deliver()

    def _deliver(self) -> None:
        """Let the protocol have what has arrived. Its error ends the connection, as event loops do."""
        found = self._decrypted()
        if self._is_over or not found or self._protocol is None:
            return
        try:
            if data := found[0] if len(found) == 1 else b"".join(found):
                self._protocol.data_received(data)
            if not found[-1]:
                self._protocol.eof_received()
                self.close()
        except Exception as error:
            message = {"message": "A protocol failed.", "exception": error, "transport": self}
            asyncio.get_running_loop().call_exception_handler(message)
            self.abort()

    def _decrypted(self) -> list[bytes]:
        """Return the data of all records that have arrived. The last one is empty if it ends the connection."""
        found: list[bytes] = []
        try:
            while self._incoming.pending and not self._is_over and not (found and not found[-1]):
                found.append(self._decrypt(_RECORD_BYTES))
        except ssl.SSLWantReadError:  # a part of a record
            pass
        except ssl.SSLError as error:
            self.fail(error)
        if self._outgoing.pending and not self._is_over:  # TLS's own answer to a record
            if self._tcp.get_write_buffer_size() > _UNSENT_BYTES:
                self.abort()  # a peer that asks and does not read
            else:
                self._flush()
        return found

    def _shake(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return
        except ssl.SSLError as error:
            self.fail(error)
            return
        self._flush()
        self.set_protocol(self._new_protocol())
        if not self.handshake.done():
            self.handshake.set_result(None)
        self.get_protocol().connection_made(self)
        if self._incoming.pending:
            self._deliver()

    def _flush(self) -> None:
        if self._outgoing.pending:
            self._tcp.write(self._outgoing.read())

    def pause_writing(self) -> None:
        if self._protocol is not None:
            self._protocol.pause_writing()

    def resume_writing(self) -> None:
        if self._protocol is not None:
            self._protocol.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_over = True
        exc = self._fault or exc
        if self._protocol is not None:
            self._protocol.connection_lost(exc)
        elif not self.handshake.done():
            self.handshake.set_exception(exc or ConnectionResetError("The connection ended within the handshake."))
            self.handshake.exception()  # perhaps nothing waits for it

    # --- the transport of the other protocol -------------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if len(data) > _PART_BYTES:
            for begin in range(0, len(data), _PART_BYTES):
                self.write(memoryview(data)[begin : begin + _PART_BYTES])
        elif data and not self._is_over:
            try:
                self._encrypt(data)
            except ssl.SSLError as error:
                self.fail(error)
            else:
                self._tcp.write(self._outgoing.read())

    def write_eof(self) -> None:
        """End what is sent. What the peer still sends is dropped, as TLS 1.2 has no half-closed connections."""
        if not self._is_over and not self._drops:
            self._end()
            self._tcp.write_eof()

    def close(self) -> None:
        if not self._is_over:
            self._end()
            self._is_over = True
            self._leave()

    def _end(self) -> None:
        if not self._drops:
            self._drops = True
            with suppress(ssl.SSLError):  # the peer's end is not awaited
                self._tls.unwrap()
            self._flush()

    def abort(self) -> None:
        self._is_over = True
        self._tcp.abort()

    def is_closing(self) -> bool:
        return self._is_over or self._tcp.is_closing()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = cast("asyncio.Protocol", protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        assert self._protocol is not None
        return self._protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "peercert":
            return self._tls.getpeercert()
        own = {"ssl_object": self._tls, "sslcontext": self._tls.context}
        return own[name] if name in own else self._tcp.get_extra_info(name, default)

    def pause_reading(self) -> None:
        self._tcp.pause_reading()

    def resume_reading(self) -> None:
        self._tcp.resume_reading()

    def is_reading(self) -> bool:
        return self._tcp.is_reading()

    def get_write_buffer_size(self) -> int:
        return self._tcp.get_write_buffer_size()

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._tcp.get_write_buffer_limits()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._tcp.set_write_buffer_limits(high, low)

    def can_write_eof(self) -> bool:
        return True


async def connect(
    new_protocol: Callable[[], _Protocol], *address: Any, tls: ssl.SSLContext | None, server_name: str, **options: Any
) -> _Protocol:
    """Open a connection, of which a task waits for the handshake, if there is one.

    Args:
        address, options: See `create_connection` of event loops.
        tls: None: no TLS.

    Raises:
        OSError: The connection or its handshake failed.
    """
    loop = asyncio.get_running_loop()
    if tls is None:
        return (await loop.create_connection(new_protocol, *address, **options))[1]
    _, connection = await loop.create_connection(
        lambda: TlsConnection(new_protocol, tls, server_name), *address, **options
    )
    try:
        await connection.handshake
    except BaseException:
        connection.abort()
        raise
    return cast("_Protocol", connection.get_protocol())
