"""Bytes to text: whole characters, and nothing of a stop string."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from causeway_server.models.llama_cpp.scheduling.sequence import TextStream


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    bounds = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in pairwise(bounds)]


def run(stream: TextStream, parts: list[bytes]) -> list[str]:
    out = []
    for part in parts:
        out.append(stream.feed(part))
        if stream.stop:
            return out
    return [*out, stream.finish()]


@given(st.text(), st.lists(st.integers(0, 1000)))
def test_the_text_does_not_depend_on_how_bytes_are_cut(text: str, cuts: list[int]) -> None:
    data = text.encode(errors="replace")
    assert "".join(run(TextStream(), pieces(data, cuts))) == data.decode()


@given(
    st.text(alphabet="abc", max_size=40),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 1000)),
)
def test_a_stop_string_ends_the_text_before_it(text: str, stops: list[str], cuts: list[int]) -> None:
    """What is shown is a prefix of the text, up to the first complete stop string."""
    stream = TextStream(stops)
    shown = "".join(run(stream, pieces(text.encode(), cuts)))
    assert text.startswith(shown)
    assert not any(stop in shown for stop in stops)
    assert bool(stream.stop) == any(stop in text for stop in stops)
    assert not stream.stop or text[len(shown) :].startswith(stream.stop)
    if not stream.stop:
        assert shown == text


def test_the_beginning_of_a_stop_string_is_held_back() -> None:
    stream = TextStream(["STOP"])
    assert stream.feed(b"a ST") == "a "
    assert stream.feed(b"ILL") == "STILL"
    assert stream.feed(b" STO") == " "
    assert stream.feed(b"P now") == ""
    assert stream.stop == "STOP"


def test_half_a_character_at_the_end_becomes_a_replacement_character() -> None:
    stream = TextStream()
    assert stream.feed("é".encode()[:1]) == ""
    assert stream.finish() == "\ufffd"
