"""The frames and header blocks of HTTP/2, by the examples of the RFCs and by peers that break their rules."""

from __future__ import annotations

import pytest

from causeway_server.cloud_pool.upstreams.triton import http2
from causeway_server.cloud_pool.upstreams.triton.http2 import CallEnd, ProtocolError


def literal(name: bytes, value: bytes, first: int = 0) -> bytes:
    return bytes((first, len(name))) + name + bytes((len(value),)) + value


@pytest.mark.parametrize(
    ("block", "headers"),
    [
        pytest.param(b"\x88", {":status": "200"}, id="indexed"),
        pytest.param(bytes.fromhex("4803333032"), {":status": "302"}, id="literal with an indexed name"),
        pytest.param(bytes.fromhex("48826402"), {":status": "302"}, id="RFC 7541 C.6.1, Huffman"),
        pytest.param(literal(b"grpc-status", b"0"), {"grpc-status": "0"}, id="literal"),
        pytest.param(literal(b"grpc-status", b"5", 0x40), {"grpc-status": "5"}, id="literal for the table"),
        pytest.param(literal(b"a", b"b", 0x10), {"a": "b"}, id="literal that is never indexed"),
        pytest.param(b"\x20\x88", {":status": "200"}, id="the table has no size"),
        pytest.param(
            bytes.fromhex("0088 25a849e95ba97d7f 89 25a849e95bb8e8b4bf".replace(" ", "")),
            {"custom-key": "custom-value"},
            id="RFC 7541 C.4.3, Huffman",
        ),
    ],
)
def test_header_block_is_decoded(block: bytes, headers: dict[str, str]) -> None:
    assert http2.read_headers(block) == headers


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(b"\xbe", id="dynamic table"),
        pytest.param(b"\x80", id="index 0"),
        pytest.param(b"\x3f\xe1\x1f", id="a table with a size"),
        pytest.param(b"\x00\x05ab", id="ends in a name"),
        pytest.param(b"\x00\x01a", id="ends before the value"),
        pytest.param(b"\x7f\xff\xff\xff\xff\xff\x0f", id="a number without end"),
        pytest.param(b"\x48\x81\x00", id="Huffman padding of zeros"),
        pytest.param(b"\x48\x84\xff\xff\xff\xff", id="Huffman end of string"),
    ],
)
def test_malformed_header_block_is_refused(block: bytes) -> None:
    with pytest.raises(ProtocolError):
        http2.read_headers(block)


def test_request_head_is_a_block_of_literals() -> None:
    """Long values have lengths of several bytes."""
    authority = "h" * 300
    block = http2.request_head("/a/B", authority)
    assert b"te\x08trailers" in block
    assert b"\x01\x7f\xad\x01" + authority.encode() in block
    assert http2.read_headers(http2.header("traceparent", "00-1") + http2.timeout_header(1.5)) == {
        "traceparent": "00-1",
        "grpc-timeout": "1500m",
    }
    assert http2.read_headers(http2.timeout_header(1e7)) == {"grpc-timeout": "10000000S"}


@pytest.mark.parametrize(
    ("headers", "end"),
    [
        ({"grpc-status": "0"}, CallEnd("OK")),
        ({"grpc-status": "14", "grpc-message": "gone%20away"}, CallEnd("UNAVAILABLE", "gone away")),
        ({"grpc-status": "99"}, CallEnd("UNKNOWN")),
        ({":status": "503"}, CallEnd("UNAVAILABLE", "The answer has no gRPC status; its HTTP status is 503.")),
        ({":status": "418"}, CallEnd("UNKNOWN", "The answer has no gRPC status; its HTTP status is 418.")),
    ],
)
def test_end_of_a_call(headers: dict[str, str], end: CallEnd) -> None:
    assert http2.call_end(headers) == end


def test_frames_are_split_and_a_part_is_left() -> None:
    data = http2.frame(http2.DATA, http2.END_STREAM, 3, b"abc") + http2.window_update(0, 7)
    assert list(http2.split_frames(data + b"\x00\x00")) == [
        (http2.DATA, http2.END_STREAM, 3, b"abc"),
        (http2.WINDOW_UPDATE, 0, 0, b"\x00\x00\x00\x07"),
    ]
    assert list(http2.split_frames(data[:11])) == []


def test_frame_beyond_the_limit_is_refused_before_it_has_come() -> None:
    with pytest.raises(ProtocolError):
        list(http2.split_frames(http2.frame(http2.DATA, 0, 1, b"x" * 16_385)[:9]))


def test_padding() -> None:
    assert http2.without_padding(http2.PADDED, b"\x02abc\x00\x00") == b"abc"
    for payload in (b"", b"\x03abc"[:3]):
        with pytest.raises(ProtocolError):
            http2.without_padding(http2.PADDED, payload)


def test_settings() -> None:
    (_, _, _, payload) = next(http2.split_frames(http2.settings({http2.MAX_STREAMS: 100})))
    assert http2.read_settings(payload) == {http2.MAX_STREAMS: 100}
    with pytest.raises(ProtocolError):
        http2.read_settings(payload[1:])
