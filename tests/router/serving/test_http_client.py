"""The HTTP client against servers that are told each byte: the error of each fault, which connections are reused."""

from __future__ import annotations

import asyncio
import gzip
import os
import socket
import ssl
import struct
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop

from causeway_server.router.serving.http_client import (
    ConnectError,
    DisconnectedError,
    HttpClient,
    HttpClientError,
    HttpResponse,
    MalformedError,
    TruncatedError,
    field_lines,
)
from causeway_server.router.serving.tls.contexts import HTTP1, TlsContext, TlsFiles, client_tls
from tests.redis_deployments import Certificates
from tests.waiting import until

OK = b"HTTP/1.1 200 OK\r\n"
REST = b"Content-Length: 5\r\n\r\nhello"
HELLO = OK + REST
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
LINES = "Content-Type: application/json\r\n"
CLOSE, RESET, CUT = "close", "reset", "cut"
Reply = Sequence[bytes | str]


class Server:
    """Answers the requests in order with these replies; the last one is repeated. A reply may end its connection."""

    def __init__(self, *replies: Reply) -> None:
        self.replies = replies
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []
        self.writers: list[asyncio.StreamWriter] = []
        self.closed = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
                self.bodies.append(await reader.readexactly(int(length or b"0")))
                self.heads.append(head)
                for piece in self.replies[min(len(self.heads), len(self.replies)) - 1]:
                    if piece == RESET:
                        raw: socket.socket = writer.get_extra_info("socket")
                        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        writer.transport.abort()
                    if piece == CUT:  # TCP ends, and TLS does not
                        writer.get_extra_info("socket").shutdown(socket.SHUT_WR)
                    if isinstance(piece, str):
                        return
                    writer.write(piece)
                    await writer.drain()
        except (asyncio.CancelledError, asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.closed += 1
            writer.close()


@asynccontextmanager
async def client_of(server: Server, *, limit: int = 8, idle_s: float = 60.0) -> AsyncIterator[HttpClient]:
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/v1"
    client = HttpClient(url, tls=None, limit=limit, connect_timeout_s=30.0, idle_s=idle_s)
    async with listener:
        try:
            yield client
        finally:
            client.close()
            for writer in server.writers:
                writer.close()


def soon(seconds: float = 30.0) -> float:
    return asyncio.get_running_loop().time() + seconds


async def ask(client: HttpClient, body: bytes | None = b"{}", seconds: float = 30.0) -> tuple[int, bytes]:
    response = await client.request("POST", "/v1/chat", LINES, soon(seconds), body)
    try:
        return response.status, await body_of(response)
    finally:
        response.release()


async def body_of(response: object) -> bytes:
    pieces = []
    while piece := await response.read():  # type: ignore[attr-defined]
        pieces.append(piece)
    return b"".join(pieces)


def compressed(coding: bytes, data: bytes) -> bytes:
    return OK + b"Content-Encoding: %b\r\nContent-Length: %d\r\n\r\n%b" % (coding, len(data), data)


def raw_deflate(data: bytes) -> bytes:
    stream = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return stream.compress(data) + stream.flush()


@pytest.mark.parametrize(
    ("reply", "body"),
    [
        ([HELLO], b"hello"),
        ([CHUNKED + b"3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"], b"hello"),
        ([CHUNKED + b"5;a=b\r\nhello\r\n0\r\nX-Trailer: 1\r\n\r\n"], b"hello"),
        ([CHUNKED + b"5 \r\nhello\r\n0\r\n\r\n"], b"hello"),
        ([OK + b"\r\nhello", CLOSE], b"hello"),
        ([b"HTTP/1.0 200 OK\r\n\r\nhello", CLOSE], b"hello"),
        ([HELLO.replace(b"\r\n", b"\n")], b"hello"),
        ([b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + HELLO], b"hello"),
        ([OK + b"X-Long: " + b"x" * 8000 + b"\r\n" + REST], b"hello"),
        ([compressed(b"gzip", gzip.compress(b"hello"))], b"hello"),
        ([compressed(b"gzip", gzip.compress(b"hel") + gzip.compress(b"lo"))], b"hello"),
        ([compressed(b"gzip", gzip.compress(b"x" * 2_000_000) * 3)], b"x" * 6_000_000),
        ([compressed(b"gzip", gzip.compress(b"hello") + b"\0\0\0")], b"hello"),
        ([compressed(b"deflate", zlib.compress(b"hello"))], b"hello"),
        ([compressed(b"deflate", zlib.compress(b"hello") + b"\x1f\x8b")], b"hello"),
        ([compressed(b"deflate", raw_deflate(b"hello"))], b"hello"),
        ([compressed(b"gzip", gzip.compress(b"x" * 5_000_000))], b"x" * 5_000_000),
        ([compressed(b"other", b"hello")], b"hello"),
        ([OK + b"Content-Length: 0\r\n\r\n"], b""),
        ([b"HTTP/1.1 204 No Content\r\n\r\n"], b""),
    ],
)
async def test_an_answer_is_read_whatever_its_framing(reply: Reply, body: bytes) -> None:
    async with client_of(Server(reply)) as client:
        assert (await ask(client))[1] == body


DATED = OK + b"Date: Mon, 30 Nov 2026 06:00:00 GMT\r\nContent-Length: %d\r\nServer: one\r\n\r\n%b"
FIVE = DATED % (5, b"hello")


@pytest.mark.parametrize(
    ("reply", "is_known"),
    [
        ([FIVE], True),
        ([DATED % (12, b"another text")], True),
        ([DATED % (0, b"")], True),
        ([FIVE.replace(b"06:00:00", b"06:00:01")], False),
        ([FIVE.replace(b"Server: one", b"Server: two")], False),
        ([FIVE.replace(b"Server: one\r\n", b"")], False),
        ([FIVE.replace(b"200 OK", b"500 No")], False),
        ([FIVE.replace(b"Length: 5", b"Length: +5"), CLOSE], False),
        ([FIVE[:-2], b"lo"], None),
        ([FIVE[:40], FIVE[40:]], None),
        ([FIVE + b"surplus"], False),
        ([b"HTTP/1.1 100 Continue\r\n\r\n" + FIVE], False),
        ([CHUNKED + b"5\r\nhello\r\n0\r\n\r\n"], False),
    ],
)
async def test_a_head_that_came_before_is_read_like_a_new_one(
    monkeypatch: pytest.MonkeyPatch, reply: Reply, is_known: bool | None
) -> None:
    taken: set[HttpResponse] = set()
    take = HttpResponse.take_known
    monkeypatch.setattr(HttpResponse, "take_known", lambda one, head, body: (taken.add(one), take(one, head, body)))
    found, known = [], []
    for replies in ([FIVE], reply, [FIVE]), (reply,):
        async with client_of(Server(*replies)) as client:
            for _ in replies:
                response, error, body = None, None, b""
                try:
                    response = await client.request("POST", "/v1/chat", LINES, soon(), b"{}")
                    body = await body_of(response)
                except HttpClientError as fault:
                    error = str(fault)
                assert error or response is not None
                found.append((response and (response.status, response.headers), body, error))
                known.append(response in taken)
    assert found[1] == found[3]
    assert found[0] == found[2]  # after it, too
    assert is_known in (known[1], None)  # None: it depends on how many reads it took


async def test_a_head_is_not_known_by_an_answer_with_a_surplus() -> None:
    async with client_of(Server([DATED % (4, b"hello")])) as client:
        await ask(client)
        assert client.head is None


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        ([CLOSE], DisconnectedError),
        ([RESET], DisconnectedError),
        ([OK[:12], CLOSE], DisconnectedError),
        ([b"HTTP/1.1 100 Continue\r\n\r\n", CLOSE], DisconnectedError),
        ([b""], TimeoutError),
        ([OK], TimeoutError),
        ([b"220 mail.example ESMTP\r\n"], MalformedError),
        ([b"\x16\x03\x01\x02\x00\x01"], MalformedError),
        ([b"HTTP/3.0 200 OK\r\n\r\n"], MalformedError),
        ([OK + b"no colon\r\n\r\n"], MalformedError),
        ([OK + b"X: a\0b\r\n\r\n"], MalformedError),
        ([OK + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"], MalformedError),
        ([OK + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello"], MalformedError),
        ([OK + b"Content-Length: -5\r\n\r\nhello"], MalformedError),
        ([OK + b"X: y\r\n" * 129 + REST], MalformedError),
        ([OK + b"X: " + b"y" * 9000 + b"\r\n" + REST], MalformedError),
        ([OK] + [b"X: y\r\n" * 1000] * 100, MalformedError),
        ([OK + b"X: "] + [b"y" * 10_000] * 100, MalformedError),
        ([b"HTTP/1.1 103 Early Hints\r\n\r\n" * 1000] * 100, MalformedError),
        ([compressed(b"br", b"hello")], MalformedError),
        ([OK + b"Content-Length: 9\r\n\r\nhello", CLOSE], TruncatedError),
        ([OK + b"Content-Length: 9\r\n\r\nhello", RESET], TruncatedError),
        ([OK + b"\r\nhello", RESET], TruncatedError),
        ([OK + b"Content-Length: 9\r\n\r\nhello"], TimeoutError),
        ([CHUNKED + b"5\r\nhello\r\n", CLOSE], TruncatedError),
        ([CHUNKED.replace(b"chunked", b"Chunked") + b"5\r\nhello\r\n", CLOSE], TruncatedError),
        ([CHUNKED + b"5\r\nhello\r\nnot a size\r\n"], MalformedError),
        ([CHUNKED + b"5\r\nhelloworld\r\n"], MalformedError),
        ([CHUNKED + b"5\r\nhello\r\n0\r\nX: "] + [b"y" * 10_000] * 100, MalformedError),
    ],
)
async def test_every_fault_has_its_error(reply: Reply, error: type[Exception]) -> None:
    """And the connection is closed."""
    server = Server(reply)
    async with client_of(server) as client:
        with pytest.raises(error) as caught:
            await ask(client, seconds=0.1 if error is TimeoutError else 30.0)
        assert type(caught.value) is error
        await until(lambda: server.closed == 1)
    assert len(server.heads) == 1


@pytest.mark.parametrize("field", [b"X: a\0b\r\n", b"X: y\r\n" * 129, b"X: " + b"y" * 9000 + b"\r\n"])
async def test_a_head_that_is_refused_is_no_response(field: bytes) -> None:
    async with client_of(Server([OK + field + REST])) as client:
        with pytest.raises(MalformedError):
            await client.request("GET", "/", "", soon())


@pytest.mark.parametrize("data", [b"hello", gzip.compress(b"hello")[:-3], gzip.compress(b"hello") + b"\x1f\x8b\x08"])
async def test_a_body_that_is_not_in_its_encoding_is_malformed(data: bytes) -> None:
    async with client_of(Server([compressed(b"gzip", data)])) as client:
        with pytest.raises(MalformedError):
            await ask(client)


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_an_answer_may_be_cut_anywhere(framing: str) -> None:
    whole = HELLO if framing == "length" else CHUNKED + b"3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"
    server = Server(*[[whole[:at], whole[at:]] for at in range(1, len(whole))])
    async with client_of(server) as client:
        for _ in server.replies:
            assert await ask(client) == (200, b"hello")
    assert len(server.writers) == 1


async def test_a_request_is_sent_as_it_was_given() -> None:
    server = Server([HELLO])
    async with client_of(server) as client:
        response = await client.request("DELETE", "/v1/jobs?a=%20", field_lines({"X-A": "ü"}), soon())
        response.release()
        await ask(client, b'{"a":1}')
        port = server.writers[0].get_extra_info("sockname")[1]
    host = b"Host: 127.0.0.1:%d\r\n" % port
    assert server.heads[0] == b"DELETE /v1/jobs?a=%20 HTTP/1.1\r\n" + host + "X-A: ü\r\n\r\n".encode()
    assert server.heads[1].endswith(b"Content-Type: application/json\r\nContent-Length: 7\r\n\r\n")
    assert server.bodies == [b"", b'{"a":1}']


@pytest.mark.parametrize("value", ["a\r\nX-B: 1", "a\nb"])
def test_a_header_with_the_end_of_a_line_is_not_sent(value: str) -> None:
    with pytest.raises(ValueError, match="line break"):
        field_lines({"X-A": value})


@pytest.mark.parametrize(
    "reply",
    [
        [HELLO + HELLO],
        [HELLO + b"x"],
        [OK + b"Connection: close\r\n" + REST],
        [b"HTTP/1.0" + HELLO[8:]],
        [OK + b"\r\nhello", CLOSE],
    ],
)
async def test_a_connection_of_which_more_or_no_more_comes_is_not_reused(reply: Reply) -> None:
    server = Server(reply)
    async with client_of(server) as client:
        for _ in range(2):
            assert await ask(client) == (200, b"hello")
    assert len(server.writers) == 2


async def test_bytes_that_come_unasked_end_an_idle_connection() -> None:
    server = Server([HELLO])
    async with client_of(server) as client:
        await ask(client)
        server.writers[0].write(HELLO)
        await until(lambda: server.closed == 1)
        await ask(client)
    assert len(server.writers) == 2


async def test_an_idle_connection_is_closed_after_its_time() -> None:
    server = Server([HELLO])
    async with client_of(server, idle_s=0.02) as client:
        await ask(client)
        await until(lambda: server.closed == 1)


@pytest.mark.parametrize("fault", [CLOSE, RESET])
async def test_a_pooled_connection_that_ends_without_an_answer_is_replaced(fault: str) -> None:
    server = Server([HELLO], [fault], [HELLO])
    async with client_of(server) as client:
        for _ in range(2):
            assert await ask(client) == (200, b"hello")
    assert (len(server.heads), len(server.writers)) == (3, 2)


async def test_a_request_of_which_something_came_back_is_not_sent_again() -> None:
    server = Server([HELLO], [OK[:1], CLOSE], [HELLO])
    async with client_of(server) as client:
        await ask(client)
        with pytest.raises(DisconnectedError):
            await ask(client)
    assert len(server.heads) == 2


REFUSED = b"HTTP/1.1 429 Too Many Requests\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhello"


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
@pytest.mark.parametrize("sent", [REFUSED, OK + b"\r\nhello", b"", REFUSED[:20]])
def test_what_comes_before_the_first_request_answers_it(
    run: Callable[[Coroutine[None, None, None]], None], sent: bytes
) -> None:
    """uvloop may read it, and the end, before the request is sent."""

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        writer.close()

    async def main() -> None:
        listener = await asyncio.start_server(refuse, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        client = HttpClient(url, tls=None, limit=1, connect_timeout_s=30.0, idle_s=1.0)
        async with listener:
            for _ in range(5):  # each gives its place back
                if sent.endswith(b"hello"):
                    assert await ask(client) == (int(sent[9:12]), b"hello")
                else:
                    with pytest.raises(DisconnectedError):
                        await ask(client)
        client.close()

    run(main())


async def test_a_refused_connection_has_the_systems_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        client = HttpClient(url, tls=None, limit=1, connect_timeout_s=30.0, idle_s=1.0)
        for _ in range(2):  # a failed connection gives its place back
            with pytest.raises(ConnectError) as caught:
                await client.request("GET", "/", "", soon())
            assert isinstance(caught.value.cause, ConnectionRefusedError)


async def test_a_connection_that_takes_too_long_is_an_error_of_the_connection() -> None:
    """Unless the request itself is late."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.socket() as first, socket.socket() as second:
        for one in (first, second):
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        url = f"http://127.0.0.1:{full.getsockname()[1]}"
        client = HttpClient(url, tls=None, limit=1, connect_timeout_s=0.1, idle_s=1.0)
        with pytest.raises(ConnectError):
            await client.request("GET", "/", "", soon())
        with pytest.raises(TimeoutError):
            await client.request("GET", "/", "", soon(0.05))


async def test_a_request_that_is_cancelled_as_its_answer_arrives_does_not_break_the_next_one() -> None:
    server, turn = Server([]), asyncio.sleep(0)
    async with client_of(server) as client:
        first = asyncio.create_task(ask(client))
        await until(lambda: len(server.heads) == 1)
        server.writers[0].write(HELLO)
        await turn  # the answer is read later in this turn, and both tasks run in the next one
        second = asyncio.create_task(ask(client))
        asyncio.get_running_loop().call_soon(first.cancel)
        await until(lambda: len(server.heads) == 2)
        server.writers[0].write(HELLO)
        assert await second == (200, b"hello")
        assert first.cancelled()
    assert len(server.writers) == 1


async def test_a_cancelled_request_ends_its_connection() -> None:
    server = Server([b""])
    async with client_of(server) as client:
        leaving = asyncio.ensure_future(ask(client))
        await until(lambda: server.heads)
        leaving.cancel()
        await until(lambda: server.closed == 1)


async def test_an_answer_that_is_given_up_ends_its_connection() -> None:
    server = Server([CHUNKED + b"5\r\nhello\r\n"])
    async with client_of(server) as client:
        response = await client.request("GET", "/", "", soon())
        assert await response.read() == b"hello"
        response.release()
        await until(lambda: server.closed == 1)


async def test_a_connection_whose_answer_lacks_only_its_end_is_reused_if_that_comes() -> None:
    server = Server([CHUNKED + b"5\r\nhello\r\n"], [HELLO])
    async with client_of(server) as client:
        response = await client.request("GET", "/", "", soon())
        assert await response.read() == b"hello"
        response.release(within_s=30.0)
        server.writers[0].write(b"0\r\n\r\n")
        await until(lambda: response.complete)
        await ask(client)
        assert len(server.writers) == 1
        late = await client.request("GET", "/", "", soon())
        late.release(within_s=30.0)
        assert len(server.writers) == 1


async def test_at_the_limit_requests_wait_for_their_turn() -> None:
    """The one that has waited longest is next, and one that leaves takes no turn with it."""
    server = Server([OK + b"Content-Length: 5\r\n\r\n"], [HELLO])
    async with client_of(server, limit=1) as client:
        first = await client.request("GET", "/0", "", soon())
        waiting = [asyncio.ensure_future(client.request("GET", f"/{at}", "", soon())) for at in range(1, 5)]
        with pytest.raises(TimeoutError):
            await client.request("GET", "/late", "", soon(0.02))
        waiting.pop(1).cancel()
        server.writers[0].write(b"hello")
        assert await body_of(first) == b"hello"
        for response in await asyncio.gather(*waiting):
            assert await body_of(response) == b"hello"
    assert [head.split()[1] for head in server.heads] == [b"/0", b"/1", b"/3", b"/4"]
    assert len(server.writers) == 1


async def test_at_the_limit_a_connection_that_ends_makes_room_for_another() -> None:
    server = Server([OK + b"Content-Length: 5\r\n\r\n"], [HELLO])
    async with client_of(server, limit=1) as client:
        first = await client.request("GET", "/", "", soon())
        waiting = asyncio.ensure_future(ask(client))
        await asyncio.sleep(0)
        first.release()
        assert await waiting == (200, b"hello")
    assert len(server.writers) == 2


async def test_a_connection_that_ends_as_it_is_handed_on_makes_room_for_another(tmp_path: Path) -> None:
    """Over TLS the end arrives together with the answer."""
    certificates = Certificates(tmp_path)
    ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ours.load_cert_chain(certificates.server, certificates.server_key)
    listener = await asyncio.start_server(Server([HELLO, CLOSE]).serve, "127.0.0.1", 0, ssl=ours)
    url = f"https://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    trusting = client_tls(TlsFiles(where="", ca_file=str(certificates.ca)))
    client = HttpClient(url, tls=trusting, limit=1, connect_timeout_s=30.0, idle_s=1.0)
    async with listener:
        assert await asyncio.gather(*(ask(client) for _ in range(4))) == [(200, b"hello")] * 4
    client.close()


@asynccontextmanager
async def tls_client_of(server: Server, folder: Path, now: Sequence[float] = (0.0,)) -> AsyncIterator[HttpClient]:
    """A client with one connection, which trusts `ca.pem` in the folder."""
    certificates = Certificates(folder)
    ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ours.load_cert_chain(certificates.server, certificates.server_key)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=ours)
    files = TlsFiles(where="", ca_file=str(certificates.ca))
    trusting = TlsContext(ssl.PROTOCOL_TLS_CLIENT, files=files, alpn=HTTP1, clock=lambda: now[0])
    url = f"https://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    client = HttpClient(url, tls=trusting, limit=1, connect_timeout_s=30.0, idle_s=60.0)
    async with listener:
        yield client
        client.close()


@pytest.mark.parametrize("waits", [False, True])
async def test_a_connection_under_old_certificates_is_not_used_again(tmp_path: Path, *, waits: bool) -> None:
    """Nor is it handed on to a request that waits for it."""
    now, server = [0.0], Server([OK + b"Content-Length: 5\r\n\r\n"], [HELLO])
    async with tls_client_of(server, tmp_path, now) as client:
        first = await client.request("GET", "/", "", soon())
        waiting = [asyncio.ensure_future(ask(client))] if waits else []
        await asyncio.sleep(0)
        os.utime(tmp_path / "ca.pem", (1.0, 1.0))
        now[0] = 1e6
        server.writers[0].write(b"hello")
        assert await body_of(first) == b"hello"
        assert not client.is_ready
        assert await (waiting[0] if waits else ask(client)) == (200, b"hello")
        assert len(server.writers) == 2


async def test_an_answer_without_a_length_is_whole_only_if_tls_ends_too(tmp_path: Path) -> None:
    """The end of TCP alone may be an attacker's."""
    server = Server([OK + b"\r\nhello", CLOSE], [OK + b"\r\nhello", CUT])
    async with tls_client_of(server, tmp_path) as client:
        assert await ask(client) == (200, b"hello")
        with pytest.raises(TruncatedError):
            await ask(client)


async def test_an_unread_answer_is_not_taken_from_the_server() -> None:
    """While others come and go. Its connection is used again once it is read."""
    size = 16 * 1024 * 1024
    server = Server([OK + b"Content-Length: %d\r\n\r\n" % size, b"x" * size], [HELLO])
    async with client_of(server) as client:
        response = await client.request("GET", "/", "", soon())
        assert response.status == 200
        for _ in range(200):
            await ask(client)
        assert server.writers[0].transport.get_write_buffer_size() > size // 2
        assert len(await body_of(response)) == size
        await asyncio.gather(ask(client), ask(client))
    assert len(server.writers) == 2


async def test_closing_the_client_ends_what_waits() -> None:
    server = Server([OK])
    async with client_of(server, limit=1) as client:
        waiting = [asyncio.ensure_future(ask(client)) for _ in range(2)]
        await until(lambda: server.heads)
        client.close()
        results = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(result, BaseException) for result in results)


async def test_tls_is_with_the_server_that_the_certificate_names(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ours.load_cert_chain(certificates.server, certificates.server_key)
    server = Server([HELLO], [CLOSE], [OK + b"\r\nhello", CLOSE])
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=ours)
    url = f"https://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)  # of the refused handshake
    async with listener:
        for trusted in (True, False):
            tls = client_tls(TlsFiles(where="", ca_file=str(certificates.ca) if trusted else ""))
            client = HttpClient(url, tls=tls, limit=1, connect_timeout_s=30.0, idle_s=60.0)
            if trusted:
                for _ in range(2):
                    assert await ask(client) == (200, b"hello")
                assert (len(server.heads), len(server.writers)) == (3, 2)
            else:
                with pytest.raises(ConnectError) as caught:
                    await ask(client)
                assert isinstance(caught.value.cause, ssl.SSLCertVerificationError)
            client.close()


class FailingTransport(asyncio.Transport):
    """A transport that cannot be written to."""

    aborted = False

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        raise RuntimeError("a fault of the transport")

    def abort(self) -> None:
        self.aborted = True


async def test_requests_leave_together_except_what_was_given_up_or_cannot_be_sent() -> None:
    server, failing = Server([HELLO]), FailingTransport()
    async with client_of(server) as client:
        await asyncio.gather(*(ask(client, b"a%d" % number) for number in range(3)))
        client.write(failing, b"a request")
        begun = [client.begin("POST", "/v1/chat", LINES, soon(), b"b%d" % number) for number in range(3)]
        first, given_up, last = [one for one in begun if one is not None]
        given_up.release()
        for response in (first, last):
            while not response.complete:
                await response.wait()
            assert await body_of(response) == b"hello"
    assert failing.aborted
    assert sorted(body for body in server.bodies if body.startswith(b"b")) == [b"b0", b"b2"]
    assert isinstance(given_up.error, DisconnectedError)
