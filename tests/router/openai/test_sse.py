"""Server-sent events, in pieces of any size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from causeway_server.router.errors import CloudFailed
from causeway_server.router.openai.upstream.decode import Event, SSEParser, event

STREAM = (
    b": a comment\nretry: 10\n\n"
    b"data: one\n\n"
    b"event: error\nid: 7\ndata:two\ndata\ndata:  three\n\n"
    b"event: nothing\n\n"
    b"data: four\n\ndata: cut"
)
EVENTS = [Event(b"one"), Event(b"two\n\n three", b"error", b"7"), Event(b"four", b"", b"7")]


def parse(stream: bytes, *cuts: int) -> list[Event]:
    parser = SSEParser()
    ends = [*sorted(cuts), len(stream)]
    starts = [0, *ends]
    return [found for start, end in zip(starts, ends, strict=False) for found in parser.feed(stream[start:end])]


def test_events_as_the_standard_has_them() -> None:
    assert parse(STREAM) == EVENTS


@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"])
@given(data=st.data())
def test_any_cutting_gives_the_same_events(newline: bytes, data: st.DataObject) -> None:
    """With any of the three line ends, and with or without a byte order mark."""
    stream = data.draw(st.sampled_from([b"", b"\xef\xbb\xbf"])) + STREAM.replace(b"\n", newline)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=12))
    assert parse(stream, *cuts) == EVENTS
    assert parse(stream, *range(len(stream))) == EVENTS


@given(st.lists(st.binary(max_size=20), max_size=4), st.data())
def test_an_encoded_event_reads_back(payloads: list[bytes], data: st.DataObject) -> None:
    stream = b"".join([event(payload) for payload in payloads])
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=8))
    plain = [payload.replace(b"\r\n", b"\n").replace(b"\r", b"\n") for payload in payloads]
    assert [found.data for found in parse(stream, *cuts)] == plain


@given(st.binary(max_size=60), st.lists(st.integers(0, 60), max_size=6))
def test_any_bytes_give_the_same_events_in_any_pieces(stream: bytes, cuts: list[int]) -> None:
    assert parse(stream, *[min(cut, len(stream)) for cut in cuts]) == parse(stream)


@pytest.mark.parametrize(
    "pieces",
    [
        [b"data: " + b"x" * 200],
        [b"data: x"] + [b"x"] * 200,
        [b"data: x\n"] * 40,
        [b"event: " + b"x" * 200 + b"\n"],
        [b":" + b"x" * 200],
    ],
)
def test_an_endless_event_is_refused(pieces: list[bytes]) -> None:
    """One long line, one that arrives slowly, and many lines without an end."""
    parser = SSEParser(max_event_bytes=100)
    with pytest.raises(CloudFailed):
        [parser.feed(piece) for piece in pieces]


def test_many_events_are_not_one_long_event() -> None:
    parser = SSEParser(max_event_bytes=20)
    assert len([found for _ in range(100) for found in parser.feed(b"data: 12345\n\nda")]) == 1
    # A line in two pieces counts once.
    parser = SSEParser(max_event_bytes=15)
    assert sum(len(parser.feed(piece)) for _ in range(100) for piece in (b"data: 12", b"345\n", b"\n")) == 100


def test_a_cut_stream_is_noticed() -> None:
    parser = SSEParser()
    parser.feed(b"data: a\n\n")
    assert not parser.pending
    parser.feed(b"data: b\n")
    assert parser.pending
    parser.feed(b"\n")
    assert not parser.pending
