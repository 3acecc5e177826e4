"""The grammar of one utterance: llama.cpp reads it, and answers hold only the utterance's own words."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator

import pytest

from models.catalog.artifact import find_artifact
from models.chat.template import PromptRenderer
from models.function_calls.call import parse_call
from models.function_calls.grammar import ANY_CALL, MOST_CHARACTERS, MOST_PIECES, call_grammar, copy_source_of
from router.types import ImagePart, Message, Request, ResponseFormat, TextPart, Tool, ToolChoice

llama_cpp = pytest.importorskip("llama_cpp")

from models.evaluate.greedy import GreedyModel  # noqa: E402

ODD = (
    "add Suites & Sweets to my playlist",
    'say "six\\am" to  me, café!',
    "rate Varney the Vampire Varney the Vampire with 1 points",
    "日本 の 天気",
    "tab\tand\nline \x07",
    "a",
)


def values(arguments: dict[str, str | list[str]]) -> list[str]:
    return [one for value in arguments.values() for one in (value if isinstance(value, list) else [value])]


@pytest.mark.parametrize("text", [*ODD, "", "   ", "word " * MOST_PIECES])
def test_every_answer_is_a_call_that_copies(text: str) -> None:
    """Whatever is said, the answer is a call in JSON, and each value stands in what was said."""
    with GreedyModel(find_artifact("assistant").path, slots=1, context=2048, threads=1) as model:
        prompt = model.tokenize(PromptRenderer(model.chat_template).user(text))
        answer = model.answers([prompt], 320, [call_grammar(text)])[0]
    call = parse_call(answer.text)
    assert call is not None, answer.text
    if text.count("word") < MOST_PIECES:
        assert all(value in text for value in values(call.arguments))


def test_long_texts_fall_back_to_any_value() -> None:
    """A rule for every word of a page would be slow to read: beyond a bound the general grammar serves."""
    assert call_grammar("word " * MOST_PIECES) == ANY_CALL
    assert call_grammar("x" * 100_000) == ANY_CALL
    assert call_grammar("x" * MOST_CHARACTERS) != ANY_CALL
    assert call_grammar("six am") != ANY_CALL


def test_without_words_there_are_no_arguments() -> None:
    """White space alone can fill no argument."""
    assert 'arguments ::= "{}"' in call_grammar(" \n ")


def spelled(gbnf: str) -> list[str]:
    """Everything that a value can be, as often as the rules can spell it."""
    rules = {
        name: re.findall(r'("(?:[^"\\]|\\.)*")(?: (w\d+))?', rule)
        for name, rule in (line.split(" ::= ", 1) for line in gbnf.splitlines() if line.startswith(("value", "w")))
    }

    def runs(name: str) -> Iterator[str]:
        for literal, behind in rules[name]:
            yield json.loads(literal)
            yield from (json.loads(literal) + rest for rest in (runs(behind) if behind else ()))

    return [json.loads(f'"{run}"') for run in runs("value")]


@pytest.mark.parametrize(
    "text", ["six am", "a b a b a", "x x x x", 'the "the" \\ the "the"', "no, no,no no", "tick  tock"]
)
def test_a_value_is_a_run_of_words_and_each_is_spelled_one_way(text: str) -> None:
    """All runs, no others; however often words come back, there is never a choice between the same words."""
    ends = [match.span() for match in re.finditer(r"\w+|[^\w\s]", text)]
    expected = {text[start:end] for (start, _), (_, end) in itertools.combinations_with_replacement(ends, 2)}
    values = spelled(call_grammar(text))
    assert sorted(values) == sorted(expected)


def test_a_word_said_without_end_makes_no_more_rules_than_others() -> None:
    """Two for a word at most."""
    for text in ("word " * 140, "a b " * 70, "a b a c " * 35):
        assert call_grammar(text).count("\nw") <= 2 * len(text.split())


def chat(*messages: Message, **fields: object) -> Request:
    return Request(kind="chat", model="auto", messages=messages, **fields)  # type: ignore[arg-type]


def test_the_utterance_is_the_last_thing_that_the_user_said() -> None:
    """Whatever stands before or behind it; parts of a message are its lines."""
    first, last = Message("user", "one"), Message("user", (TextPart("two"), ImagePart("data:,"), TextPart("three")))
    assert copy_source_of(chat(Message("system", "be brief"), first, Message("assistant", "so"))) == "one"
    assert copy_source_of(chat(first, Message("assistant", "so"), last)) == "two\nthree"
    assert copy_source_of(chat(Message("system", "be brief"))) is None
    assert copy_source_of(chat(Message("user", None))) is None


def test_who_says_what_the_answer_is_gets_that() -> None:
    """A response format, `text` among them, or a call that must come; tools that may be called change nothing."""
    said, tools = Message("user", "one"), (Tool("alarm_set"),)
    assert copy_source_of(chat(said, tools=tools)) == "one"
    assert copy_source_of(chat(said, tools=tools, tool_choice=ToolChoice("none"))) == "one"
    assert copy_source_of(chat(said, tools=tools, tool_choice=ToolChoice("required"))) is None
    assert copy_source_of(chat(said, tools=tools, tool_choice=ToolChoice("function", "alarm_set"))) is None
    for kind in ("text", "json_object", "json_schema"):
        assert copy_source_of(chat(said, response_format=ResponseFormat(kind))) is None
    assert copy_source_of(Request(kind="completion", model="auto", prompts=("one",))) is None
