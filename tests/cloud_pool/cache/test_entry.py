"""An answer as bytes."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from causeway_server.cloud_pool.cache.entry_codec import CorruptEntry, EntryCodec, pack_batch, unpack_batch
from causeway_server.cloud_pool.core.request_context import AnswerHead
from causeway_server.router.types import Chunk, Request, TokenLogprob, ToolCallDelta, Usage

KEY = "0" * 32
HEAD = AnswerHead((("x-causeway-tier", "large"),))
ANSWER = (
    Chunk(text="wor", tokens=1),
    Chunk(text="ds ", tokens=1, index=1),
    Chunk(text="ds", tokens=1, logprobs=(TokenLogprob("ds", -0.5),)),
    Chunk(finish_reason="stop"),
    Chunk(tool_calls=(ToolCallDelta(0, "{}", "id", "lamp"),), index=1, finish_reason="tool_calls"),
    Chunk(usage=Usage(5, 3)),
)


ASKED = Request(kind="chat", model="big", max_tokens=12)


def codec(secret: bytes = b"", *, compress_above: int = 1 << 20, most: int = 1 << 20) -> EntryCodec:
    return EntryCodec(secret, compress_above_bytes=compress_above, max_entry_bytes=most)


@pytest.mark.parametrize("compress_above", [0, 1 << 20])
def test_round_trip(compress_above: int) -> None:
    """Each choice comes back in one chunk followed by its end, with the usage last."""
    made = codec(compress_above=compress_above)
    entry = made.pack(KEY, HEAD, ASKED, ANSWER)
    assert entry is not None
    found = made.unpack(KEY, entry, 3.0)
    assert (found.head, found.age_s) == (HEAD, 3.0)
    assert found.chunks == (
        Chunk(text="words", tokens=2, logprobs=(TokenLogprob("ds", -0.5),)),
        Chunk(finish_reason="stop"),
        Chunk(text="ds ", tokens=1, index=1, tool_calls=(ToolCallDelta(0, "{}", "id", "lamp"),)),
        Chunk(index=1, finish_reason="tool_calls"),
        Chunk(usage=Usage(5, 3)),
    )


def test_entry_above_the_threshold_is_compressed() -> None:
    text = "the same words again " * 500
    entry = codec(compress_above=1000).pack(KEY, HEAD, ASKED, [Chunk(text=text, finish_reason="stop")])
    assert entry is not None
    assert len(entry) < len(text) / 10


@given(at=st.integers(0, 1000), bit=st.integers(0, 7), compress_above=st.sampled_from([0, 1 << 20]))
def test_any_flipped_bit_is_corrupt(at: int, bit: int, compress_above: int) -> None:
    made = codec(compress_above=compress_above)
    entry = bytearray(made.pack(KEY, HEAD, ASKED, ANSWER) or b"")
    entry[at % len(entry)] ^= 1 << bit
    with pytest.raises(CorruptEntry):
        made.unpack(KEY, bytes(entry), 0.0)


@given(st.binary(max_size=200))
def test_foreign_bytes_are_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptEntry):
        codec().unpack(KEY, data, 0.0)
    with pytest.raises(CorruptEntry):
        unpack_batch(data, 0)


def test_entry_of_another_key_or_secret_is_corrupt() -> None:
    entry = codec(b"s" * 16).pack(KEY, HEAD, ASKED, ANSWER)
    assert entry is not None
    for other, key in ((codec(b"s" * 16), "1" * 32), (codec(b"t" * 16), KEY), (codec(), KEY)):
        with pytest.raises(CorruptEntry):
            other.unpack(key, entry, 0.0)


def test_entry_that_inflates_beyond_the_limit_is_corrupt() -> None:
    text = "a" * 1_000_000
    entry = codec(compress_above=0).pack(KEY, HEAD, ASKED, [Chunk(text=text, finish_reason="stop")])
    assert entry is not None
    with pytest.raises(CorruptEntry):
        codec(most=len(entry)).unpack(KEY, entry, 0.0)


@pytest.mark.parametrize(
    "chunks",
    [
        [],
        [Chunk(text="no end")],
        [Chunk(text="filtered", finish_reason="content_filter")],
        [Chunk(refusal="I cannot help with that.", finish_reason="stop")],
        [Chunk(text=" \n", finish_reason="stop")],
        [Chunk(text="cut by the server", finish_reason="length"), Chunk(usage=Usage(5, 11))],
        [Chunk(text="x" * 5000, finish_reason="stop")],
    ],
    ids=["nothing", "unfinished", "filtered", "refused", "empty", "server's limit", "too large"],
)
def test_incomplete_or_too_large_answer_is_no_entry(chunks: list[Chunk]) -> None:
    assert codec(most=4000).pack(KEY, HEAD, ASKED, chunks) is None


def test_an_answer_of_the_length_that_was_asked_for_is_an_entry() -> None:
    chunks = [Chunk(text="as long as asked", finish_reason="length"), Chunk(usage=Usage(5, 12))]
    assert codec().pack(KEY, HEAD, ASKED, chunks) is not None
    assert codec().pack(KEY, HEAD, msgspec.structs.replace(ASKED, max_tokens=None), chunks) is None


def test_overlapping_batch_gives_only_the_rest() -> None:
    """A batch behind a gap is corrupt."""
    data = pack_batch(2, HEAD, ANSWER[2:4])
    assert unpack_batch(data, 2) == (HEAD, ANSWER[2:4])
    assert unpack_batch(data, 3)[1] == ANSWER[3:4]
    assert unpack_batch(data, 9)[1] == ()
    with pytest.raises(CorruptEntry):
        unpack_batch(data, 1)
