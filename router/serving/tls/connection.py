"""TLS of connections, between a TCP transport and a protocol.

Event loops have such a layer. Theirs interleaves OpenSSL's work with that of the protocols, each of which displaces the
other from the processor's caches; and it drops OpenSSL's alert when a handshake fails. Here OpenSSL decrypts what has
arrived for all connections of a loop in a row, then the protocols get it, then OpenSSL encrypts what they wrote.
"""

from __future__ import annotations

import asyncio
import contextvars
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeVar, cast
from weakref import WeakKeyDictionary

_RECORD_BYTES: Final = 16 * 1024  # maximum plaintext of a record, and of a read (RFC 8446, 5.1)
_HELD_BYTES: Final = 256 * 1024  # maximum undecrypted bytes that wait for the turn
_LINGER_S: Final = 30.0  # maximum time in which the last bytes must leave
_UNSENT_BYTES: Final = 64 * 1024  # maximum unsent bytes of a peer that gets an answer of TLS's own
_SINGLE_TURNS: Final = 4
_ALONE: Final = 64
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
        loop = asyncio.get_running_loop()
        self.handshake: asyncio.Future[None] = loop.create_future()
        self._new_protocol = new_protocol
        self._protocol: asyncio.Protocol | None = None
        self._turn = _TURNS.get(loop) or _TURNS.setdefault(loop, _Turn())
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_name is None, server_hostname=server_name
        )
        direct: Any = self._tls._sslobj  # type: ignore[attr-defined]  # noqa: SLF001 - two calls fewer for a record
        self._decrypt, self._encrypt = direct.read, direct.write
        self._unsent: list[bytes] = []  # written data
        self._unsent_bytes = 0
        self._is_over = False
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
        self._incoming.write(data)
        if self._protocol is None:
            self._shake()
        elif self._turn.alone or self._incoming.pending > _HELD_BYTES:  # libuv reads a full socket on and on
            self._turn.alone = max(0, self._turn.alone - 1)
            self.deliver(self.decrypt())
        else:
            self._turn.add(self._turn.arrived, self)

    def decrypt(self) -> list[bytes]:
        """Return the data of all records that have arrived. The last one is empty if it ends the connection."""
        found: list[bytes] = []
        try:
            while self._incoming.pending and not self._is_over:
                found.append(self._decrypt(_RECORD_BYTES))
                if not found[-1]:
                    return found
        except ssl.SSLWantReadError:  # a part of a record
            if self._tcp.get_write_buffer_size() > _UNSENT_BYTES and self._outgoing.pending:
                self.abort()  # a peer that asks and does not read
            self._flush()  # TLS's own answer to a record
        except ssl.SSLError as error:
            self.fail(error)
        return found

    def deliver(self, found: list[bytes]) -> None:
        """Let the protocol have decrypted data. Its error ends the connection, as event loops do."""
        if self._is_over or not found or self._protocol is None:
            return
        data = found[0] if len(found) == 1 else b"".join(found)
        try:
            if data:
                self._protocol.data_received(data)
            if not found[-1]:
                self._protocol.eof_received()
                self.close()
        except Exception as error:
            message = {"message": "A protocol failed.", "exception": error, "transport": self}
            asyncio.get_running_loop().call_exception_handler(message)
            self.abort()

    def send(self) -> None:
        """Encrypt the written data, and send it."""
        data = self._unsent[0] if len(self._unsent) == 1 else b"".join(self._unsent)
        self._unsent.clear()
        self._unsent_bytes = 0
        if data and not self._is_over:
            try:
                self._encrypt(data)
            except ssl.SSLError as error:
                self.fail(error)
            else:
                self._tcp.write(self._outgoing.read())

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
            self._turn.add(self._turn.arrived, self)

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
        if not self._unsent and not self._turn.alone:
            self._turn.add(self._turn.written, self)
        self._unsent.append(data if type(data) is bytes else bytes(data))
        self._unsent_bytes += len(data)
        if self._turn.alone or self._unsent_bytes >= _RECORD_BYTES:  # the protocol may have to pause
            self.send()

    def close(self) -> None:
        if not self._is_over:
            self.send()
            self._is_over = True
            with suppress(ssl.SSLError):  # the peer's end is not awaited
                self._tls.unwrap()
            self._flush()
            self._leave()

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
        return self._tcp.get_write_buffer_size() + self._unsent_bytes

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._tcp.get_write_buffer_limits()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._tcp.set_write_buffer_limits(high, low)

    def can_write_eof(self) -> bool:
        return False


class _Turn:
    """The work of a loop's connections that is done in a row.

    Attributes:
        arrived, written: The connections with undecrypted, and with unencrypted bytes.
        alone: Number of times that arriving bytes are decrypted at once, because few connections are in use: a turn of
            one connection costs time and saves none.
    """

    def __init__(self) -> None:
        self.alone = 0
        self._context = contextvars.Context()  # of no request
        self._single = 0  # turns in a row that had one connection
        self.arrived: list[TlsConnection] = []
        self.written: list[TlsConnection] = []
        self._is_scheduled = False

    def add(self, queue: list[TlsConnection], connection: TlsConnection) -> None:
        queue.append(connection)
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._run, context=self._context)

    def _run(self) -> None:
        try:
            arrived = [(one, one.decrypt()) for one in self.arrived]
            self.arrived.clear()
            is_single = max(len(arrived), len(self.written)) < 2
            self._single = self._single + 1 if is_single else 0
            for one, found in arrived:
                one.deliver(found)
            for one in self.written:
                one.send()
            self.written.clear()
            if self._single == _SINGLE_TURNS:
                self._single, self.alone = 0, _ALONE
        finally:
            self._is_scheduled = False


_TURNS: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, _Turn]] = WeakKeyDictionary()


async def connect(
    new_protocol: Callable[[], _Protocol],
    *address: Any,
    tls: ssl.SSLContext | None,
    server_name: str,
    **options: Any,
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
