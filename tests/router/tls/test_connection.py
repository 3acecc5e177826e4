"""TLS between transport and protocol: pieces, ends, faults and full buffers, with OpenSSL as the peer."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import cast

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from causeway_server.router.config import ListenerTls
from causeway_server.router.serving.tls.connection import TlsConnection, connect
from causeway_server.router.serving.tls.contexts import TlsContext, TlsFiles, client_tls, server_tls
from causeway_server.router.serving.tls.server import TlsServer
from tests.certificates import Authority


class Echo(asyncio.Protocol):
    """Sends what it receives, except for `quiet`. `raise` makes it fail, `close` makes it close, `fill` makes it write
    until it pauses.
    """

    def __init__(self) -> None:
        self.events: list[str] = []
        self.lost: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self.written = 0
        self.paused = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("TlsConnection", transport)

    def data_received(self, data: bytes) -> None:
        if data != b"quiet":
            self.transport.write(data)
        if data.endswith(b"raise"):
            raise LookupError("of the protocol")
        if data == b"close":
            self.transport.close()
        while data == b"fill" and not self.paused.is_set():
            self.transport.write(memoryview(bytearray(4096)))
            self.written += 4096

    def pause_writing(self) -> None:
        self.paused.set()

    def eof_received(self) -> None:
        self.events.append("eof")

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set_result(exc)


class Peer:
    """A client whose TLS is in memory, so that its bytes can be sent in any pieces. `echo`: the server's protocol."""

    echo: Echo

    def __init__(self, ca: Authority, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = ssl.create_default_context(cafile=str(ca.file))
        self.tls = context.wrap_bio(self._in, self._out, server_hostname="localhost")

    async def call(self, action: Callable[[], bytes | None]) -> bytes | None:
        """Do something that may need bytes of the server. Raises SSLError."""
        while True:
            with contextlib.suppress(ssl.SSLWantReadError):
                done = action()
                self.writer.write(self._out.read())
                return done
            self.writer.write(self._out.read())
            self._in.write(received) if (received := await self.reader.read(2**16)) else self._in.write_eof()

    def encrypted(self, *messages: bytes) -> bytes:
        for message in messages:
            self.tls.write(message)
        return self._out.read()

    async def read(self, size: int) -> bytes:
        """Return so many bytes, fewer if the server ends the connection as TLS asks for."""
        pieces: list[bytes] = []
        while (left := size - sum(map(len, pieces))) and (piece := await self.call(partial(self.tls.read, left))):
            pieces.append(piece)
        return b"".join(pieces)


class Site:
    """A server of `Echo` and its protocols."""

    def __init__(self, folder: Path) -> None:
        self.ca = Authority(folder / "ca")
        own = self.ca.issue("server")
        tls = server_tls(ListenerTls(str(own.cert), str(own.key)), "server.tls")
        assert tls is not None
        self.server = TlsServer(self._new, tls, "server.port")
        self.echoes: list[Echo] = []
        self._made: asyncio.Queue[Echo] = asyncio.Queue()

    def _new(self) -> Echo:
        self.echoes.append(Echo())
        self._made.put_nowait(self.echoes[-1])
        return self.echoes[-1]

    @property
    def port(self) -> int:
        return int(self.server.sockets[0].getsockname()[1])

    @property
    def trusting(self) -> TlsContext:
        return client_tls(TlsFiles(where="", ca_file=str(self.ca.file)))

    async def peer(self, key_log: Path | None = None) -> Peer:
        made = Peer(self.ca, *await asyncio.open_connection("127.0.0.1", self.port))
        if key_log is not None:
            made.tls.context.keylog_filename = str(key_log)
        await made.call(made.tls.do_handshake)
        made.echo = await self._made.get()
        return made


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    one = Site(tmp_path)
    await one.server.start("127.0.0.1", 0, 16)
    yield one
    one.server.close()
    for echo in one.echoes:
        echo.transport.abort()


@pytest.mark.parametrize("size", [1, 7, 2**20])
async def test_records_arrive_in_any_pieces(site: Site, size: int) -> None:
    peer = await site.peer()
    sent = [b"small", b"x" * 100_000, b"last"] if size > 7 else [b"small", b"last"]
    raw = peer.encrypted(*sent)
    for at in range(0, len(raw), size):
        peer.writer.write(raw[at : at + size])
        await peer.writer.drain()
        await asyncio.sleep(0)
    assert await peer.read(sum(map(len, sent))) == b"".join(sent)


async def test_a_large_write_arrives_whole(site: Site) -> None:
    peer = await site.peer()
    sent = bytes(range(256)) * 4096
    peer.echo.transport.write(memoryview(sent))
    assert await peer.read(len(sent)) == sent


async def test_connections_whose_bytes_arrive_together_get_their_own(site: Site) -> None:
    """A protocol that fails ends its connection alone."""
    seen: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: seen.append(context))
    peers = [await site.peer() for _ in range(12)]
    for turn in range(20):
        for at, peer in enumerate(peers):
            peer.writer.write(peer.encrypted(b"turn %d of %d;" % (turn, at)))
        if turn == 10:
            peers[0].writer.write(peers[0].encrypted(b"raise"))
            with contextlib.suppress(ssl.SSLError, ConnectionError):
                await peers.pop(0).read(2**20)
        for at, peer in enumerate(peers, turn >= 10):
            wanted = b"turn %d of %d;" % (turn, at - (turn > 10))
            assert await peer.read(len(wanted)) == wanted
    assert [type(one["exception"]) for one in seen] == [LookupError]


async def test_both_ends_are_told(site: Site) -> None:
    """The protocol gets the data before the peer's end, and the peer all of it before ours."""
    peer = await site.peer()
    raw = peer.encrypted(b"last")
    with contextlib.suppress(ssl.SSLWantReadError):
        peer.tls.unwrap()
    peer.writer.write(raw + peer.encrypted())
    assert await peer.echo.lost is None
    assert peer.echo.events == ["eof"]
    peer = await site.peer()
    peer.writer.write(peer.encrypted(b"close"))
    assert await peer.read(100) == b"close"


async def test_a_server_that_has_ended_drops_what_still_comes_until_its_peer_ends(site: Site) -> None:
    peer = await site.peer()
    peer.echo.transport.write(b"refused")
    peer.echo.transport.write_eof()
    assert await peer.read(100) == b"refused"
    for _ in range(20):
        peer.writer.write(peer.encrypted(b"x" * 100_000))
        await peer.writer.drain()
    assert await peer.reader.read() == b""  # its end, and no reset
    assert not peer.echo.lost.done()
    peer.writer.close()
    assert await peer.echo.lost is None


async def test_bytes_that_are_not_tls_end_the_connection_with_an_alert(site: Site) -> None:
    peer = await site.peer()
    peer.writer.write(b"\x17\x03\x03\x00\x20" + b"x" * 32)
    with pytest.raises(ssl.SSLError, match="BAD_RECORD_MAC"):
        await peer.read(1)
    assert isinstance(await peer.echo.lost, ssl.SSLError)


async def test_a_protocol_is_paused_as_it_writes(site: Site) -> None:
    """A client that does not read holds a bounded number of bytes."""
    peer = await site.peer()
    peer.writer.transport.pause_reading()  # type: ignore[attr-defined]  # it can
    peer.writer.write(peer.encrypted(b"fill"))
    await peer.echo.paused.wait()
    assert peer.echo.transport.get_write_buffer_size() < 2**18
    peer.writer.transport.resume_reading()  # type: ignore[attr-defined]
    assert len(await peer.read(peer.echo.written)) == peer.echo.written


@pytest.mark.parametrize(("version", "command", "is_answered"), [("-tls1_3", b"K", True), ("-tls1_2", b"R", False)])
async def test_keys_are_updated_and_not_negotiated_again(
    site: Site, version: str, command: bytes, is_answered: bool
) -> None:
    process = await asyncio.create_subprocess_exec(
        *("openssl", "s_client", "-connect", f"127.0.0.1:{site.port}", "-CAfile", str(site.ca.file), version),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    printed = await process.stdout.readuntil(b"Verify return code: 0")
    process.stdin.write(command + b"\n")
    await process.stdin.drain()
    await process.stdout.readuntil(b"KEYUPDATE\n" if is_answered else b"RENEGOTIATING\n")
    process.stdin.write(b"hello\n")
    printed = await process.stdout.readuntil(b"hello\n") if is_answered else await process.stdout.read()
    assert (b"hello" in printed) == is_answered
    process.stdin.close()
    await process.communicate()


class Records:
    """Records of a client after its handshake: OpenSSL's demands for new keys (RFC 8446, 4.6.3) are not in Python.

    Args:
        log: The peer's key log. The cipher is TLS_AES_256_GCM_SHA384, Python's default.
    """

    def __init__(self, log: Path) -> None:
        line = next(line for line in log.read_text().splitlines() if line.startswith("CLIENT_TRAFFIC_SECRET_0 "))
        self._secret = bytes.fromhex(line.split()[2])

    def demand(self) -> bytes:
        """Return a demand. What follows has the next keys (7.2)."""
        record = self.first(b"\x18\x00\x00\x01\x01", b"\x16")
        self._secret = self._expanded(b"traffic upd", 48)
        return record

    def first(self, content: bytes, kind: bytes = b"\x17") -> bytes:
        """Return the first record under the present keys (5.2, 7.3)."""
        head = b"\x17\x03\x03" + (len(content) + 17).to_bytes(2, "big")
        return head + AESGCM(self._expanded(b"key", 32)).encrypt(self._expanded(b"iv", 12), content + kind, head)

    def _expanded(self, label: bytes, size: int) -> bytes:
        info = size.to_bytes(2, "big") + bytes([6 + len(label)]) + b"tls13 " + label + b"\0"
        return HKDFExpand(hashes.SHA384(), size, info).derive(self._secret)


KEY_UPDATE = b"\x17\x03\x03\x00\x16"  # the head of a record with one


@pytest.mark.parametrize("follows", [b"", b"quiet"])
async def test_tls_answers_by_itself_whether_data_follow_or_not(site: Site, tmp_path: Path, follows: bytes) -> None:
    """OpenSSL answers a demand as it reads the next record."""
    peer = await site.peer(tmp_path / "keys")
    records = Records(tmp_path / "keys")
    peer.writer.write(records.demand() + records.demand() + (records.first(follows) if follows else b""))
    async with asyncio.timeout(20):
        await peer.reader.readuntil(KEY_UPDATE)


@pytest.mark.slow
async def test_a_peer_that_makes_tls_answer_and_does_not_read_is_cut_off(site: Site, tmp_path: Path) -> None:
    peer = await site.peer(tmp_path / "keys")
    records, transport = Records(tmp_path / "keys"), peer.echo.transport
    peer.writer.transport.pause_reading()  # type: ignore[attr-defined]  # it can
    for one, option in ((peer.writer, socket.SO_RCVBUF), (transport, socket.SO_SNDBUF)):
        one.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, option, 4096)
    most = 0
    for _ in range(30):
        peer.writer.write(b"".join(records.demand() for _ in range(1000)))
        await asyncio.sleep(0)
        with contextlib.suppress(ConnectionError):
            await peer.writer.drain()
        most = max(most, transport.get_write_buffer_size())
        if peer.echo.lost.done():
            break
    assert peer.echo.lost.done()
    assert most < 2**19


async def test_a_client_learns_that_the_handshake_failed(site: Site) -> None:
    """The server ends it, or the caller does not wait any longer."""
    echo = await connect(Echo, "127.0.0.1", site.port, tls=site.trusting, server_name="localhost")
    assert echo.transport.get_extra_info("ssl_object").version() == "TLSv1.3"
    assert echo.transport.get_extra_info("peername")[1] == site.port
    echo.transport.close()
    silent = await asyncio.start_server(lambda _, writer: None, "127.0.0.1", 0)
    ending = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    for server, wait_s, error in ((ending, 30.0, ConnectionError), (silent, 0.05, TimeoutError)):
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(error):
            await asyncio.wait_for(connect(Echo, "127.0.0.1", port, tls=site.trusting, server_name="localhost"), wait_s)
        server.close()
