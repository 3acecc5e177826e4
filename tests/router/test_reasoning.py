"""Thoughts in a model's text: kept apart from the answer, counted, bounded by the effort."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from causeway_server.router.reasoning import EFFORT_TOKENS, ReasoningParser, Thinking, thinking_limit, thinks
from causeway_server.router.types import Request, ResponseFormat, Tool, ToolChoice

ASK = Request(kind="chat", model="m")


def parse(text: str, *cuts: int, inside: bool = False) -> tuple[str, str]:
    parser = ReasoningParser(inside=inside)
    ends = [*sorted(cuts), len(text)]
    pieces = [parser.feed(text[start:end]) for start, end in zip([0, *ends], ends, strict=False)] + [parser.finish()]
    return "".join([thought for thought, _ in pieces]), "".join([answer for _, answer in pieces])


# text → (thought, answer)
MARKED = [
    ("<think>\nHm.\n\nYes.\n</think>\n\nFour.", ("Hm.\n\nYes.", "Four.")),
    ("<think>\n\n</think>\n\nFour.", ("", "Four.")),
    (" \n<think>Hm.</think>Four.\n", ("Hm.", "Four.\n")),
    ("<think>Hm. a < b </th", ("Hm. a < b </th", "")),
    ("<think>Hm.", ("Hm.", "")),
    ("Four.", ("", "Four.")),
    ("  Four.", ("", "  Four.")),
    ("The mark <think> is text here, and so is </think>.", ("", "The mark <think> is text here, and so is </think>.")),
    ("<thin", ("", "<thin")),
    ("<think>a</think>b</think>", ("a", "b</think>")),
    ("", ("", "")),
]
OPENED = [
    ("Hm.\n</think>\n\nFour.", ("Hm.", "Four.")),
    ("\n<think>\nHm.</think>Four.", ("Hm.", "Four.")),  # the model repeats the mark
    ("</think>Four.", ("", "Four.")),
    ("Hm. No end", ("Hm. No end", "")),
    ("<thin", ("<thin", "")),
]


@pytest.mark.parametrize(("text", "expected"), MARKED)
def test_a_thought_is_no_part_of_the_answer(text: str, expected: tuple[str, str]) -> None:
    assert parse(text) == expected
    assert parse(text, *range(len(text))) == expected


@pytest.mark.parametrize(("text", "expected"), OPENED)
def test_the_prompt_may_have_the_first_mark(text: str, expected: tuple[str, str]) -> None:
    assert parse(text, inside=True) == expected
    assert parse(text, *range(len(text)), inside=True) == expected


@given(st.lists(st.sampled_from(["<think>", "</think>", "<", "/", "\n", " ", "a", "think>"]), max_size=8), st.data())
def test_any_cutting_gives_the_same(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=10))
    for inside in (False, True):
        assert parse(text, *cuts, inside=inside) == parse(text, inside=inside)


def test_its_tokens_are_counted_with_the_marks() -> None:
    parser = ReasoningParser(inside=False)
    for token in ("<think>", "\n", "Hm", ".", "</think>", "\n\n", "Four", "."):
        parser.feed(token, 1)
    assert parser.tokens == 5


def test_half_a_mark_is_held_back_and_no_more() -> None:
    parser = ReasoningParser(inside=True)
    assert parser.feed("Hm. a <") == ("Hm. a", "")
    assert parser.feed(" b") == (" < b", "")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, True),
        ({"reasoning_effort": "low"}, True),
        ({"reasoning_effort": "none"}, False),
        ({"response_format": ResponseFormat("json_object")}, False),
        ({"response_format": ResponseFormat("text")}, True),
        ({"tools": (Tool("lamp"),)}, True),
        ({"tools": (Tool("lamp"),), "tool_choice": ToolChoice("required")}, False),
        ({"kind": "completion"}, False),
    ],
)
def test_a_constrained_answer_has_no_thought(fields: dict[str, object], expected: bool) -> None:
    request = msgspec.structs.replace(ASK, **fields)
    thinking: Thinking
    for thinking in ("marked", "open"):
        assert thinks(request, thinking) is expected
    assert not thinks(request, "")


def test_the_effort_bounds_the_thought() -> None:
    assert thinking_limit(ASK) is None
    for effort, tokens in EFFORT_TOKENS.items():
        assert thinking_limit(msgspec.structs.replace(ASK, reasoning_effort=effort)) == tokens
