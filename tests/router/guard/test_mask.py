"""Placeholders in a request, and the values again in its answer, however a model and its chunks write them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence

import pytest

from causeway_server.router.guard.classes import GUARD_CLASSES
from causeway_server.router.guard.facts import Detector
from causeway_server.router.guard.mask import Masked, Restorer, mask, restored_whole, restorer_of
from causeway_server.router.serving.guard.runner import restored
from causeway_server.router.types import Chunk, Message, Request, ResponseFormat, ToolCallDelta

VALUES = {"<EMAIL_1>": "anna@example.org", "<EMAIL_12>": "b@example.org", "<NAME_1>": 'Ann "A" \\ Lee\n'}


def request(*texts: str, **fields: object) -> Request:
    messages = tuple(Message("user" if number % 2 == 0 else "assistant", text) for number, text in enumerate(texts))
    return Request(kind="chat", model="m", messages=messages, **fields)  # type: ignore[arg-type]


def masked(*texts: str, classes: Sequence[str] = GUARD_CLASSES) -> Masked:
    return mask(request(*texts), classes, Detector())


def contents(found: Masked) -> list[object]:
    return [message.content for message in found.request.messages]


def said(chunks: Sequence[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def called(chunks: Sequence[Chunk], index: int = 0) -> str:
    return "".join(call.arguments for chunk in chunks for call in chunk.tool_calls if call.index == index)


def texts(*pieces: str) -> list[Chunk]:
    return [*(Chunk(text=piece, tokens=1) for piece in pieces), Chunk(finish_reason="stop")]


def test_equal_values_have_one_placeholder_and_a_conversation_keeps_its_own() -> None:
    first = "I am anna@example.org, not b@example.org; key AKIAIOSFODNN7EXAMPLE"
    found = masked(first)
    assert contents(found) == ["I am <EMAIL_1>, not <EMAIL_2>; key <SECRET_1>"]
    assert found.values["<EMAIL_2>"] == "b@example.org"
    later = masked(first, "hello anna@example.org", "and c@example.org")
    assert contents(later) == [*contents(found), "hello <EMAIL_1>", "and <EMAIL_3>"]


def test_only_the_named_classes_are_masked() -> None:
    assert contents(masked("a@example.org 192.168.17.4", classes=("ip",))) == ["a@example.org <IP_1>"]
    plain = request("nothing")
    assert mask(plain, GUARD_CLASSES, Detector()).request is plain


def test_a_placeholder_that_the_request_contains_is_not_used() -> None:
    """A model that repeats it means the literal."""
    found = masked("write <EMAIL_1> and a@example.org")
    assert contents(found) == ["write <EMAIL_1> and <EMAIL_2>"]
    assert said(restored_whole(texts("<EMAIL_1> <EMAIL_2>"), restorer_of(found))) == "<EMAIL_1> a@example.org"


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("<EMAIL_1>", "anna@example.org"),
        ("to <EMAIL_1>, <EMAIL_12>!", "to anna@example.org, b@example.org!"),
        ("<<EMAIL_1>>", "<anna@example.org>"),
        *((changed, changed) for changed in ("<EMAIL_2>", "<email_1>", "<EMAIL_1 >", "EMAIL_1", "&lt;EMAIL_1&gt;")),
        ("a < b <EMAIL", "a < b <EMAIL"),
        ("\\u003cEMAIL_1\\u003e", "\\u003cEMAIL_1\\u003e"),
        ("", ""),
    ],
)  # fmt: skip
def test_text_is_restored_in_every_chunking_of_two_and_in_single_characters(written: str, expected: str) -> None:
    """What a model changes stays as it wrote it."""
    cuts = [[written[:at], written[at:]] for at in range(len(written) + 1)]
    for pieces in (*cuts, list(written)):
        restorer = Restorer(VALUES)
        assert said([restorer.chunk(chunk) for chunk in texts(*pieces)]) == expected
        assert restorer.end() == ()


@pytest.mark.parametrize("mark", ["<NAME_1>", "\\u003cNAME_1\\u003e", "\\u003CNAME_1>", "<NAME_1\\u003E"])
@pytest.mark.parametrize("before", ["", "\\\\", "\\n", '\\"', "<"])
def test_json_is_restored_with_escapes_in_every_chunking_of_two(mark: str, before: str) -> None:
    """As text of an answer in JSON, and as arguments of a call, whose markers may be escaped."""
    written = f'{{"a": "{before}{mark}"}}'
    expected = json.loads(f'{{"a": "{before}"}}')["a"] + VALUES["<NAME_1>"]
    for at in range(len(written) + 1):
        pieces = (written[:at], written[at:])
        restorer = Restorer(VALUES, is_json=True)
        as_text = [restorer.chunk(chunk) for chunk in texts(*pieces)]
        deltas = [Chunk(tool_calls=(ToolCallDelta(1, piece, "c", "f"),)) for piece in pieces]
        as_call = [restorer.chunk(chunk) for chunk in (*deltas, Chunk(finish_reason="tool_calls"))]
        assert json.loads(said(as_text)) == {"a": expected}
        assert json.loads(called(as_call, 1)) == {"a": expected}


def test_an_escaped_backslash_before_u003c_is_not_a_marker() -> None:
    written = '{"a": "\\\\u003cNAME_1>"}'
    restorer = Restorer(VALUES, is_json=True)
    assert said([restorer.chunk(chunk) for chunk in texts(*written)]) == written


def test_choices_calls_and_fields_hold_their_own_starts() -> None:
    restorer = Restorer(VALUES)
    chunks = [
        Chunk(text="<EMA", reasoning="<EMAIL", index=0),
        Chunk(text="<EMAIL_", index=1),
        Chunk(text="IL_1>", reasoning="_12>", index=0),
        Chunk(tool_calls=(ToolCallDelta(0, '"<EMAIL_1'), ToolCallDelta(1, '"<EMAIL_12')), index=0),
        Chunk(text="1>", index=1, finish_reason="stop"),
        Chunk(tool_calls=(ToolCallDelta(1, '>"'), ToolCallDelta(0, '>"')), index=0, finish_reason="tool_calls"),
    ]
    found = [restorer.chunk(chunk) for chunk in chunks]
    first, second = [one for one in found if one.index == 0], [one for one in found if one.index == 1]
    assert (said(first), said(second)) == ("anna@example.org", "anna@example.org")
    assert "".join(one.reasoning for one in first) == "b@example.org"
    assert (called(first), called(first, 1)) == ('"anna@example.org"', '"b@example.org"')


def test_what_was_held_back_comes_with_the_last_chunk_or_at_a_broken_end() -> None:
    restorer = Restorer(VALUES)
    assert restorer.chunk(Chunk(text="a <EM", refusal="no <", tokens=2)).text == "a "
    last = restorer.chunk(Chunk(finish_reason="stop", tool_calls=(ToolCallDelta(0, "<"),)))
    assert (last.text, last.refusal, called([last])) == ("<EM", "<", "<")
    restorer.chunk(Chunk(text="b <NAME_", index=2))
    assert [(one.index, one.text) for one in restorer.end()] == [(2, "<NAME_")]


def test_a_stop_string_has_its_value() -> None:
    found = mask(request("hi a@example.org", stop=("a@example.org",)), GUARD_CLASSES, Detector())
    assert found.request.stop == ("<EMAIL_1>",)
    assert restorer_of(found).chunk(Chunk(finish_reason="stop", stop="<EMAIL_1>")).stop == "a@example.org"


def test_an_answer_in_json_is_known_by_the_request() -> None:
    found = mask(request("a@example.org", response_format=ResponseFormat("json_object")), GUARD_CLASSES, Detector())
    written = texts('{"a": "\\u003cEMAIL_1\\u003e"}')
    assert said(restored_whole(written, restorer_of(found))) == '{"a": "a@example.org"}'


async def test_chunks_are_restored_as_they_arrive_and_closing_closes_their_source() -> None:
    closed: list[str] = []

    async def source() -> AsyncIterator[Chunk]:
        try:
            yield Chunk(text="x <EMAIL")
            yield Chunk(text="_1> <")
        finally:
            closed.append("source")

    assert [chunk.text async for chunk in restored(source(), Restorer(VALUES))] == ["x ", "anna@example.org ", "<"]
    cut = restored(source(), Restorer(VALUES))
    assert (await anext(cut)).text == "x "
    await cut.aclose()
    assert closed == ["source", "source"]
