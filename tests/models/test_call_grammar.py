"""The call grammar of a message: llama.cpp compiles it, and arguments contain only words of the message."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator

import pytest

from models.catalog.artifact import find_artifact
from models.chat.template import PromptRenderer
from models.function_calls.call import parse_call
from models.function_calls.grammar import ANY_CALL, MAX_CHARACTERS, MAX_PIECES, call_grammar

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


@pytest.mark.parametrize("text", [*ODD, "", "   ", "word " * MAX_PIECES])
def test_every_answer_is_a_call_that_copies_the_message(text: str) -> None:
    with GreedyModel(find_artifact("assistant").path, slots=1, context=2048, threads=1) as model:
        prompt = model.tokenize(PromptRenderer(model.chat_template).user(text))
        answer = model.answers([prompt], 320, [call_grammar(text)])[0]
    call = parse_call(answer.text)
    assert call is not None, answer.text
    if text.count("word") < MAX_PIECES:
        assert all(value in text for value in values(call.arguments))


def test_long_texts_fall_back_to_any_value() -> None:
    """A rule for every word of a page would take long to compile."""
    assert call_grammar("word " * MAX_PIECES) == ANY_CALL
    assert call_grammar("x" * 100_000) == ANY_CALL
    assert call_grammar("x" * MAX_CHARACTERS) != ANY_CALL
    assert call_grammar("six am") != ANY_CALL


def test_without_words_there_are_no_arguments() -> None:
    assert 'arguments ::= "{}"' in call_grammar(" \n ")


def spelled(gbnf: str) -> list[str]:
    """Return everything that a value can be, once for each way in which the rules derive it."""
    rules = {
        name: re.findall(r'("(?:[^"\\]|\\.)*")(?: (w\d+))?', rule)
        for name, rule in (line.split(" ::= ", 1) for line in gbnf.splitlines() if line.startswith(("value", "w")))
    }

    def runs(name: str) -> Iterator[str]:
        for literal, following in rules[name]:
            yield json.loads(literal)
            yield from (json.loads(literal) + rest for rest in (runs(following) if following else ()))

    return [json.loads(f'"{run}"') for run in runs("value")]


@pytest.mark.parametrize(
    "text", ["six am", "a b a b a", "x x x x", 'the "the" \\ the "the"', "no, no,no no", "tick  tock"]
)
def test_a_value_is_a_run_of_words_with_one_derivation(text: str) -> None:
    """All runs and no others; repeated words never make the grammar ambiguous."""
    ends = [match.span() for match in re.finditer(r"\w+|[^\w\s]", text)]
    expected = {text[start:end] for (start, _), (_, end) in itertools.combinations_with_replacement(ends, 2)}
    values = spelled(call_grammar(text))
    assert sorted(values) == sorted(expected)


def test_repeated_words_make_at_most_two_rules_each() -> None:
    for text in ("word " * 140, "a b " * 70, "a b a c " * 35):
        assert call_grammar(text).count("\nw") <= 2 * len(text.split())
