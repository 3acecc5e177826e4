"""Requests whose length is ambiguous: a proxy in front of the gateway must never see another end than the gateway."""

from __future__ import annotations

import pytest

from tests.cloud_pool.http.test_listener import CHAT, error_of, gateway, is_alive, talk

INNER = b"GET /v1/models HTTP/1.1\r\nHost: inner\r\n\r\n"
"""The smuggled request."""


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data)


@pytest.mark.parametrize(
    "framing",
    [
        b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(b"{}") + INNER,
        b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n" + chunked(b"{}") + INNER,
        b"Content-Length: 2\r\nContent-Length: 45\r\n\r\n{}" + INNER,
        b"Content-Length: 2, 2\r\n\r\n{}" + INNER,
        b"Content-Length: +2\r\n\r\n{}" + INNER,
        b"Content-Length: 0x2\r\n\r\n{}" + INNER,
        b"Content-Length: 2 2\r\n\r\n{}" + INNER,
        b"Content-Length: \xd9\xa2\r\n\r\n{}" + INNER,
        b"Content-Length : 2\r\n\r\n{}" + INNER,
        b"Transfer-Encoding : chunked\r\n\r\n" + chunked(b"{}") + INNER,
        b"Transfer-Encoding: xchunked\r\n\r\n" + chunked(b"{}") + INNER,
        b"Transfer-Encoding: chunked, identity\r\n\r\n" + chunked(b"{}") + INNER,
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n" + chunked(b"{}") + INNER,
        b"Transfer-Encoding:\x0bchunked\r\n\r\n" + chunked(b"{}") + INNER,
        b"X: a\rTransfer-Encoding: chunked\r\n\r\n" + chunked(b"{}") + INNER,
        b"X: a\r\n Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n{}" + INNER,
        b"X: a\x00b\r\nContent-Length: 2\r\n\r\n{}" + INNER,
        b"Transfer-Encoding: chunked\r\n\r\n-2\r\n{}\r\n0\r\n\r\n" + INNER,
        b"Transfer-Encoding: chunked\r\n\r\n0x2\r\n{}\r\n0\r\n\r\n" + INNER,
        b"Transfer-Encoding: chunked\r\n\r\n2 \r\n{}\r\n0\r\n\r\n" + INNER,
        b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffffff\r\n{}\r\n0\r\n\r\n" + INNER,
        b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}XX0\r\n\r\n" + INNER,
        b"Transfer-Encoding: chunked\r\n\r\n2\n{}\n0\n\n" + INNER,
    ],
)
async def test_request_with_two_lengths_is_refused(framing: bytes) -> None:
    """400 and the end of the connection: what follows is never read as a request."""
    async with gateway(read_timeout_s=2.0) as app:
        answer = await talk(app, CHAT + framing)
        assert answer.count(b"HTTP/1.") == 1, answer
        assert error_of(answer)[0] == 400
        assert b'"object"' not in answer
        assert await is_alive(app)


@pytest.mark.parametrize(
    "line", [b"GET /healthz\r\n\r\n", b"GET  /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", b"PRI * HTTP/2.0"]
)
async def test_malformed_request_line_is_refused(line: bytes) -> None:
    """HTTP/0.9, two spaces and HTTP/2's preface get 400 or no answer."""
    async with gateway(read_timeout_s=0.5) as app:
        answer = await talk(app, line + b"\r\n\r\nSM\r\n\r\n")
        assert not answer or error_of(answer)[0] == 400
        assert await is_alive(app)


async def test_path_traversal_is_404() -> None:
    async with gateway() as app:
        for path in (b"/../../etc/passwd", b"/v1/%2e%2e/metrics", b"//metrics", b"/v1/models/..%2f..%2fetc", b"/\x01"):
            answer = await talk(app, b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert error_of(answer)[0] in (400, 404), path


async def test_pipelined_requests_are_answered_in_turn() -> None:
    """A thousand requests in one packet use one connection's resources."""
    async with gateway() as app:
        sent = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n" * 999
        answer = await talk(app, sent + b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert answer.count(b"HTTP/1.1 200 ") == 1000


async def test_compressed_body_is_not_decompressed() -> None:
    async with gateway() as app:
        head = b"Content-Encoding: gzip\r\nConnection: close\r\nContent-Length: 4\r\n\r\n"
        assert error_of(await talk(app, CHAT + head + b"\x1f\x8b\x08\x00"))[0] == 415
