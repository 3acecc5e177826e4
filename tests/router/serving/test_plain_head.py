"""Two readers of HTTP: whatever ours reads means the same to aiohttp, which reads what ours does not know."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_parser import HttpRequestParser
from hypothesis import given, settings
from hypothesis import strategies as st

from causeway_server.router.serving.request import MAX_HEADERS, read_head

LINES = {
    b"POST /v1/chat/completions HTTP/1.1\r\n": ("POST", "/v1/chat/completions"),
    b"GET /healthz HTTP/1.1\r\n": ("GET", "/healthz"),
}
POST, GET = LINES
HOST = b"Host: localhost\r\n"
Found = tuple[str, str, list[tuple[str, str]], bytes]
"""Method, path, headers and body of the first request, all that arrived."""


def read_plainly(data: bytes) -> tuple[Found, bytes] | None:
    """Return the first request, and what follows it; None: ours does not read it."""
    head = read_head(data, LINES)
    if head is None:
        return None
    place = head.match(data)
    assert place is not None, "a head matches what it was read from"
    begin, end = place
    return (head.method, head.path, list(head.headers.items()), data[begin:end]), data[end:]


async def read_by_aiohttp(data: bytes) -> list[Found]:
    """Return the requests of `data`, each of a connection that is kept. Raises HttpProcessingError."""
    protocol = BaseProtocol(asyncio.get_running_loop())
    parser = HttpRequestParser(
        protocol, asyncio.get_running_loop(), 2**16, max_headers=MAX_HEADERS, auto_decompress=False
    )
    protocol._parser = parser  # noqa: SLF001
    messages, upgraded, _ = parser.feed_data(data)
    assert not upgraded
    found: list[Found] = []
    for message, payload in messages:
        assert not message.should_close
        assert not message.chunked
        assert message.version == (1, 1)
        headers = [(name, value) for name, value in message.headers.items() if name.lower() != "content-length"]
        body = b"".join(payload._buffer) if hasattr(payload, "_buffer") else b""  # noqa: SLF001
        found.append((message.method, message.path, headers, body))
    return found


async def check(data: bytes) -> bool:
    """Compare the readers; return whether ours has read `data`."""
    ours = read_plainly(data)
    if ours is None:
        return False
    request, rest = ours
    (theirs,) = await read_by_aiohttp(data[: len(data) - len(rest)])
    assert request[:2] == theirs[:2]
    assert [(name.lower(), value) for name, value in request[2]] == [(name.lower(), value) for name, value in theirs[2]]
    assert request[3] == theirs[3]
    return True


def post(*lines: bytes, body: bytes = b"{}") -> bytes:
    return POST + HOST + b"".join(line + b"\r\n" for line in lines) + b"\r\n" + body


PLAIN = {
    "with a body": post(b"Content-Length: 2"),
    "without a body": post(b"Content-Length: 0", body=b""),
    "a body that has not come": post(b"Content-Length: 200", body=b"{"),
    "pipelined": post(b"Content-Length: 2") * 3,
    "with leading zeros": post(b"Content-Length: 002"),
    "odd spaces": post(b"content-LENGTH:\t 2", b"X:", b"Y: \t a \t b\t"),
    "kept": post(b"Content-Length: 2", b"connection: Keep-Alive"),
    "to be expanded": post(b"Content-Encoding: gzip", b"Content-Length: 2"),
    "many lines": post(b"Content-Length: 2", *(b"x-%d: y" % number for number in range(MAX_HEADERS - 2))),
    "health": GET + HOST + b"\r\n",
}
OTHER = {
    "no host": POST + b"Content-Length: 2\r\n\r\n{}",
    "two hosts": post(b"Host: other", b"Content-Length: 2"),
    "no length": post(b"A: b", body=b""),
    "two lengths": post(b"Content-Length: 2", b"Content-Length: 2"),
    "a list of lengths": post(b"Content-Length: 2, 2"),
    "a signed length": post(b"Content-Length: +2"),
    "a long length": post(b"Content-Length: 0000000002"),
    "a length in other digits": post(b"Content-Length: \xd9\xa2"),
    "a length that is no number": post(b"Content-Length: 0x2"),
    "a length with a space in it": post(b"Content-Length: 2 2"),
    "a length before a space": post(b"Content-Length: 2 "),
    "a length after a space": post(b"Content-Length : 2"),
    "chunks": post(b"Transfer-Encoding: chunked", body=b"0\r\n\r\n"),
    "chunks and a length": post(b"Transfer-Encoding: chunked", b"Content-Length: 2"),
    "expectations": post(b"Expect: 100-continue", b"Content-Length: 2"),
    "an upgrade": post(b"Connection: upgrade", b"Upgrade: websocket", b"Content-Length: 2"),
    "an upgrade alone": post(b"Upgrade: h2c", b"Content-Length: 2"),
    "the end": post(b"Connection: close", b"Content-Length: 2"),
    "the end in a list": post(b"Connection: keep-alive, close", b"Content-Length: 2"),
    "the end for a proxy": post(b"Proxy-Connection: close", b"Content-Length: 2"),
    "a job": post(b"Prefer: respond-async", b"Content-Length: 2"),
    "a folded line": post(b"A: b\r\n c", b"Content-Length: 2"),
    "a bare CR": post(b"A: b\rContent-Length: 1", b"Content-Length: 2"),
    "a bare LF": post(b"A: b\nContent-Length: 1", b"Content-Length: 2"),
    "lines that end in LF": post(b"Content-Length: 2").replace(b"\r\n", b"\n"),
    "a NUL": post(b"A: \x00", b"Content-Length: 2"),
    "bytes beyond ASCII": post(b"A: \xe9", b"Content-Length: 2"),
    "no name": post(b": b", b"Content-Length: 2"),
    "a space in a name": post(b"A b: c", b"Content-Length: 2"),
    "no colon": post(b"A", b"Content-Length: 2"),
    "too many lines": post(b"Content-Length: 2", *(b"x-%d: y" % number for number in range(MAX_HEADERS - 1))),
    "a long line": post(b"Content-Length: 2", b"x: " + b"y" * 8190),
    "a line break first": b"\r\n" + post(b"Content-Length: 2"),
    "another version": post(b"Content-Length: 2").replace(b"1.1", b"1.0", 1),
    "another path": post(b"Content-Length: 2").replace(b"chat", b"chart", 1),
    "a question": post(b"Content-Length: 2").replace(b" HTTP", b"?a=b HTTP", 1),
    "a space too many": post(b"Content-Length: 2").replace(b" HTTP", b"  HTTP", 1),
    "health with a body": GET + HOST + b"Content-Length: 2\r\n\r\n{}",
    "half a head": post(b"Content-Length: 2")[:-5],
    "half a line": POST[:20],
    "nothing": b"",
}


@pytest.mark.parametrize("data", PLAIN.values(), ids=PLAIN)
async def test_both_read_the_same_request(data: bytes) -> None:
    assert await check(data)
    for size in range(len(data)):
        await check(data[:size])


@pytest.mark.parametrize("data", OTHER.values(), ids=OTHER)
def test_aiohttp_decides_about_what_is_not_plain(data: bytes) -> None:
    assert read_head(data, LINES) is None


@pytest.mark.parametrize("data", OTHER.values(), ids=OTHER)
def test_a_head_matches_no_other_one(data: bytes) -> None:
    """The last head of a connection, with the bytes of the next request."""
    for known in PLAIN.values():
        head = read_head(known, LINES)
        assert head is not None
        assert head.match(data) is None


def test_a_head_matches_one_with_another_length() -> None:
    head = read_head(post(b"Content-Length: 2", b"A: b"), LINES)
    assert head is not None
    for digits in (b"0", b"17", b"123456789"):
        data = post(b"Content-Length: " + digits, b"A: b")
        assert head.match(data) == (len(data) - 2, len(data) - 2 + int(digits))
    for digits in (b"", b"+2", b"2 ", b"-2", b"1234567890", b"\xb2"):
        assert head.match(post(b"Content-Length: " + digits, b"A: b")) is None
    assert head.match(post(b"Content-Length: 2", b"A: c")) is None


_VALUES = st.sampled_from(
    [b"2", b"0", b" 2 ", b"2,2", b"+2", b"a b", b"", b"\t", b"close", b"chunked", b"\xe9", b"\x00"]
)
_NAMES = st.sampled_from(
    [
        *(b"Host", b"host", b"Content-Length", b"content-length ", b"Transfer-Encoding", b"Connection", b"Upgrade"),
        *(b"Expect", b"A", b"a", b"X-\xe9", b"", b" B", b"Content-Type", b"Authorization", b"Cookie", b"Origin"),
    ]
)
_ENDS = st.sampled_from([b"\r\n"] * 12 + [b"\n", b"\r", b"\r\r\n", b"\r\n "])
_COLONS = st.sampled_from([b": "] * 8 + [b":", b" : ", b"", b":\t", b": \r\n "])
_FIELDS = st.lists(
    st.tuples(_NAMES, _COLONS, st.one_of(_VALUES, st.binary(max_size=4)), _ENDS).map(b"".join), max_size=5
).map(b"".join)
_STARTS = st.sampled_from([POST, POST, GET, POST.lower(), POST.replace(b"1.1", b"1.0"), b"\r\n" + GET])
_USUAL = st.sampled_from([HOST, HOST, HOST + b"Content-Length: 2\r\n", b""])
STREAMS = st.lists(
    st.tuples(_STARTS, _USUAL, _FIELDS, _USUAL, st.sampled_from([b"\r\n", b"\r\n", b"\n"]), st.binary(max_size=4)).map(
        b"".join
    ),
    min_size=1,
    max_size=2,
).map(b"".join)
EXAMPLES = 100_000 if settings.get_current_profile_name() == "fuzz" else 300


@settings(max_examples=EXAMPLES)
@given(first=STREAMS, data=STREAMS)
async def test_any_stream_is_read_by_both_or_by_aiohttp(first: bytes, data: bytes) -> None:
    """Also where the head is compared with the last one of the connection, which was read from `first`."""
    await check(data)
    head = read_head(first, LINES)
    place = None if head is None else head.match(data)
    if head is not None and place is not None:
        again = read_head(data, LINES)
        assert again is not None
        assert place == again.match(data)
        assert (head.path, list(head.headers.items())) == (again.path, list(again.headers.items()))


async def test_aiohttp_refuses_what_it_does_not_read() -> None:
    """So the comparison sees a difference."""
    with pytest.raises(HttpProcessingError):
        await read_by_aiohttp(OTHER["two lengths"])
