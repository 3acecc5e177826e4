"""TLS of listeners on real sockets: handshakes, client certificates, new files, refused certificates, floods."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from causeway_server.router.config import ListenerTls
from causeway_server.router.errors import ConfigError
from causeway_server.router.serving.listener import Address, ConnectionTable, Listener
from causeway_server.router.serving.request import PLAIN, HttpExchange, client_certificate
from causeway_server.router.serving.responses import ServerResponse, json_response
from causeway_server.router.serving.tls import contexts
from causeway_server.router.serving.tls import server as server_module
from causeway_server.router.serving.tls.contexts import HTTP1, TlsContext, TlsFiles, client_tls, server_tls
from causeway_server.router.web_origins import WebOrigins
from tests.certificates import Authority, Issued, weak_key

DEVICE = "spiffe://fleet.example/tenant/acme/device/kiosk-17"


async def _whoami(http: HttpExchange) -> ServerResponse:
    """Answer with the names in the client's certificate."""
    certificate = client_certificate(http)
    return json_response([] if certificate is None else [*certificate.uris, certificate.common_name])


@contextlib.asynccontextmanager
async def listening(config: ListenerTls, wall_clock: Callable[[], float] = time.time) -> AsyncIterator[Listener]:
    """Run a listener with these certificates."""
    table = ConnectionTable("tcp", 64, time.monotonic)
    address = Address(table, WebOrigins(), "server.port", "127.0.0.1", 0, tls=server_tls(config, "server.tls"))
    listener = Listener(_whoami, (address,), 5.0, PLAIN, wall_clock)
    await listener.start()
    try:
        yield listener
    finally:
        await listener.close()


def _config(own: Issued, client_ca: Path | None = None) -> ListenerTls:
    return ListenerTls(str(own.cert), str(own.key), "" if client_ca is None else str(client_ca))


def _client(ca: Authority, own: Issued | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(ca.file))
    if own is not None:
        context.load_cert_chain(own.cert, own.key)
    return context


async def _get(port: int, context: ssl.SSLContext, path: str = "/healthz") -> tuple[int, bytes]:
    """Send a request on a connection of its own; return the server's serial number and the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        answer = await reader.read()
        return int(writer.get_extra_info("peercert")["serialNumber"], 16), answer
    finally:
        writer.close()


async def _s_client(port: int, *options: str) -> str:
    """Return what `openssl s_client` prints for one request."""
    process = await asyncio.create_subprocess_exec(
        *("openssl", "s_client", "-ign_eof", "-connect", f"127.0.0.1:{port}", *options),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    printed, _ = await process.communicate(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    return printed.decode(errors="replace")


@pytest.fixture
def ca(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


async def test_a_listener_answers_over_tls_1_2_and_1_3_only(ca: Authority) -> None:
    """Old protocols and plain HTTP get no answer; both kinds of request, plain and through aiohttp, do."""
    async with listening(_config(ca.issue("server"))) as listener:
        assert listener.url.startswith("https://")
        port = listener.port or 0
        for path in ("/healthz", "/healthz?more=1"):
            assert b"200 OK" in (await _get(port, _client(ca), path))[1]
        trusting = ("-CAfile", str(ca.file))
        assert "Verification: OK" in await _s_client(port, *trusting, "-tls1_3")
        assert "TLSv1.2" in await _s_client(port, *trusting, "-tls1_2")
        assert "Cipher is (NONE)" in await _s_client(port, "-tls1_1", "-cipher", "ALL:@SECLEVEL=0")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"HTTP" not in await reader.read()
        writer.close()


async def test_a_client_certificate_names_the_client(ca: Authority) -> None:
    async with listening(_config(ca.issue("server"), ca.file)) as listener:
        device = ca.issue("kiosk", uri=DEVICE)
        for path in ("/healthz", "/healthz?more=1"):
            _, answer = await _get(listener.port or 0, _client(ca, device), path)
            assert DEVICE.encode() in answer
            assert b"kiosk" in answer


@pytest.mark.parametrize(
    ("fault", "alert"),
    [
        ("none", "certificate required"),
        ("expired", "certificate expired"),
        ("early", "bad certificate"),
        ("foreign", "unknown ca"),
        ("weak", "bad certificate"),
        ("revoked", "certificate revoked"),
    ],
)
async def test_a_client_certificate_that_is_not_usable_is_refused(
    ca: Authority, tmp_path: Path, fault: str, alert: str
) -> None:
    """`openssl s_client` sends each of them, and shows the alert; another client still gets its answer."""
    foreign = Authority(tmp_path / "other", "other")
    made = {
        "expired": lambda: ca.issue("bad", begins=-3, ends=-1),
        "early": lambda: ca.issue("bad", begins=1),
        "foreign": lambda: foreign.issue("bad"),
        "weak": lambda: ca.issue("bad", key=weak_key()),
        "revoked": lambda: ca.issue("bad"),
    }
    bad = made[fault]() if fault in made else None
    trust = tmp_path / "trust.pem"
    shutil.copy(ca.file, trust)
    if fault == "revoked" and bad is not None:
        ca.trust_but_revoke(bad, trust)
    async with listening(_config(ca.issue("server"), trust)) as listener:
        sent = () if bad is None else ("-cert", str(bad.cert), "-key", str(bad.key), "-cipher", "ALL:@SECLEVEL=0")
        printed = await _s_client(listener.port or 0, "-CAfile", str(ca.file), *sent)
        assert alert in printed.lower()
        assert "HTTP/1.1" not in printed
        assert b"200 OK" in (await _get(listener.port or 0, _client(ca, ca.issue("good"))))[1]


async def test_new_certificates_are_used_without_losing_a_connection(
    ca: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A half-written pair leaves the last one in use. Open connections go on, with what they began with."""
    monkeypatch.setattr(contexts, "_CHECK_S", 0.0)
    first, second = ca.issue("first"), ca.issue("second")
    cert, key = tmp_path / "live.pem", tmp_path / "live.key"
    shutil.copy(first.cert, cert)
    shutil.copy(first.key, key)
    async with listening(ListenerTls(str(cert), str(key))) as listener:
        port = listener.port or 0
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=_client(ca))
        assert (await _get(port, _client(ca)))[0] == first.serial
        shutil.copy(second.cert, cert)  # the key is still the first one's
        assert (await _get(port, _client(ca)))[0] == first.serial
        shutil.copy(second.key, key)
        assert (await _get(port, _client(ca)))[0] == second.serial
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert b"200 OK" in await reader.read()
        writer.close()


async def test_a_request_after_the_certificates_end_is_refused(ca: Authority) -> None:
    """A connection that was opened with it does not outlive it."""
    now = [time.time()]
    async with listening(_config(ca.issue("server"), ca.file), lambda: now[0]) as listener:
        device = ca.issue("device", ends=1)
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port, ssl=_client(ca, device))
        for days, status in ((0, b"200 OK"), (2, b"401 Unauthorized")):
            now[0] += days * 86400
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            body = await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split()[0]))
            assert status in head
        assert b"The client certificate has expired" in body
        writer.close()


@pytest.mark.parametrize(
    ("fault", "key", "words"),
    [
        ("expired", "cert_file", "expired on"),
        ("early", "cert_file", "is not valid before"),
        ("weak", "cert_file", "too weak"),
        ("mismatch", "key_file", "does not belong to"),
        ("no cert", "cert_file", "holds no PEM certificate"),
        ("no key", "key_file", "holds no PEM private key"),
        ("missing", "cert_file", "No such file"),
        ("only cert", "key_file", "needs the certificate's private key"),
        ("only ca", "cert_file", "needs its certificate"),
        ("no ca", "client_ca_file", "holds no PEM certificates"),
        ("leaf as ca", "client_ca_file", "no certificate of a CA"),
        ("passphrase", "key_file", "has a passphrase"),
    ],
)
def test_own_files_that_are_not_usable_are_refused_at_start(
    ca: Authority, tmp_path: Path, fault: str, key: str, words: str
) -> None:
    good, text = ca.issue("good"), tmp_path / "text.pem"
    text.write_text("hello")
    cert_file, key_file, ca_file = str(good.cert), str(good.key), ""
    if fault in ("expired", "early", "weak"):
        days = {"expired": (-3, -1), "early": (1, 2), "weak": (-1, 2)}[fault]
        bad = ca.issue("bad", begins=days[0], ends=days[1], key=weak_key() if fault == "weak" else None)
        cert_file, key_file = str(bad.cert), str(bad.key)
    elif fault == "passphrase":
        _encrypt(good.key)
    else:
        changes = {
            "mismatch": (cert_file, str(ca.issue("other").key), ""),
            "no cert": (str(text), key_file, ""),
            "no key": (cert_file, str(text), ""),
            "missing": (str(tmp_path / "none.pem"), key_file, ""),
            "only cert": (cert_file, "", ""),
            "only ca": ("", "", str(ca.file)),
            "no ca": (cert_file, key_file, str(text)),
            "leaf as ca": (cert_file, key_file, cert_file),
        }
        cert_file, key_file, ca_file = changes[fault]
    with pytest.raises(ConfigError) as caught:
        server_tls(ListenerTls(cert_file, key_file, ca_file), "server.tls")
    assert caught.value.where == f"server.tls.{key}"
    assert words in caught.value.message


def _encrypt(key: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    private = serialization.load_pem_private_key(key.read_bytes(), None)
    key.write_bytes(
        private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )


async def test_silent_connections_exclude_nobody(ca: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound the oldest handshake gives way, and each ends in time."""
    monkeypatch.setattr(server_module, "MAX_HANDSHAKES", 4)
    async with listening(_config(ca.issue("server"))) as listener:
        silent = [await asyncio.open_connection("127.0.0.1", listener.port) for _ in range(12)]
        assert b"200 OK" in (await _get(listener.port or 0, _client(ca)))[1]
        for reader, _ in silent[:8]:
            assert await reader.read() == b""
        for _, writer in silent:
            writer.close()


async def test_a_silent_handshake_ends(ca: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HANDSHAKE_S", 0.05)
    async with listening(_config(ca.issue("server"))) as listener:
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize("fault", ["foreign", "expired", "other name"])
async def test_a_client_refuses_a_server_that_it_cannot_verify(ca: Authority, tmp_path: Path, fault: str) -> None:
    """Nothing is sent to it in clear either."""
    trusted = Authority(tmp_path / "other", "other") if fault == "foreign" else ca
    context = client_tls(TlsFiles(where="clouds.main", ca_file=str(trusted.file)))
    server = ca.issue("server")
    if fault == "expired":
        server = ca.issue("old", begins=-3, ends=-1)
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(server.cert, server.key)
    received = bytearray()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.extend(await reader.read())
        writer.close()

    listening_server = await asyncio.start_server(take, "127.0.0.1", 0, ssl=serving)
    port = listening_server.sockets[0].getsockname()[1]
    with pytest.raises(ssl.SSLCertVerificationError):
        await asyncio.open_connection(
            "127.0.0.1", port, ssl=context, server_hostname="fleet.example" if fault == "other name" else "127.0.0.1"
        )
    listening_server.close()
    assert not received


def test_a_blocking_client_uses_new_files_too(ca: Authority, tmp_path: Path) -> None:
    """MQTT's client has sockets of its own, which the context wraps."""
    now = [0.0]
    trust = tmp_path / "trust.pem"
    shutil.copy(ca.file, trust)
    files = TlsFiles(where="mqtt", ca_file=str(trust))
    context = TlsContext(ssl.PROTOCOL_TLS_CLIENT, files=files, alpn=HTTP1, clock=lambda: now[0])
    left, right = socket.socketpair()
    with left, right, context.wrap_socket(left, server_hostname="x", do_handshake_on_connect=False) as wrapped:
        before = wrapped.context.get_ca_certs(binary_form=True)
    shutil.copy(Authority(tmp_path / "next", "next").file, trust)
    assert context.newest().get_ca_certs(binary_form=True) == before
    now[0] = 2.0
    assert context.newest().get_ca_certs(binary_form=True) != before
