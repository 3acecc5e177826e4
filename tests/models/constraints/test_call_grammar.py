"""The call grammar of a message: llguidance compiles it, and arguments contain only words of the message."""

from __future__ import annotations

import itertools
import json
import re

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from causeway_server.models.catalog.artifact import find_artifact
from causeway_server.models.constraints.grammars import ANY_CALL, MAX_CHARACTERS, MAX_LISTED, MAX_PIECES, call_grammar
from causeway_train.data.prompt_renderer import PromptRenderer
from causeway_train.function_calls.call import parse_call

llama_cpp = pytest.importorskip("llama_cpp")

from causeway_train.evaluate.greedy import GreedyModel  # noqa: E402


class Bytes:
    """A vocabulary of single bytes."""

    eos_token_id, bos_token_id = 256, None
    tokens = (*(bytes([byte]) for byte in range(256)), b"\xff<end>")
    special_token_ids = (256,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


BYTES = LLTokenizer(TokenizerWrapper(Bytes()), n_vocab=257, slices=[])
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


def accepts(grammar: str, text: str) -> bool:
    """Return whether a whole answer is of the grammar, byte by byte."""
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    raw = list(text.encode())
    return bool(matcher.try_consume_tokens(raw) == len(raw) and matcher.is_accepting())


def call(value: str) -> str:
    return json.dumps({"name": "f", "arguments": {"a": value}}, ensure_ascii=False, separators=(",", ":"))


def test_without_words_there_are_no_arguments() -> None:
    grammar = call_grammar(" \n ")
    assert accepts(grammar, '{"name":"f","arguments":{}}')
    assert not accepts(grammar, call(""))


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        *("six am", "a b a b a", "x x x x", 'the "the" \\ the "the"', "no, no,no no", "tick  tock"),
        'a "b", ' * (MAX_LISTED // 2),
    ],
)
def test_a_value_is_a_run_of_words(text: str) -> None:
    """All runs and no others: part of a word, words in another order, and spaces at the edge are none."""
    grammar = call_grammar(text)
    ends = [match.span() for match in re.finditer(r"\w+|[^\w\s]", text)]
    runs = {text[start:end] for (start, _), (_, end) in itertools.combinations_with_replacement(ends, 2)}
    others = {text[start:end] for start in range(len(text)) for end in range(start, len(text) + 1)} - runs
    assert [run for run in runs if not accepts(grammar, call(run))] == []
    assert [other for other in others | {text + " x"} if accepts(grammar, call(other))] == []


@pytest.mark.parametrize("text", ["six am", "six am " * MAX_LISTED])
def test_several_values_and_bounded_names(text: str) -> None:
    """Of the runs of a short text, which are listed, and of a long one."""
    grammar = call_grammar(text)
    assert accepts(grammar, '{"name":"f","arguments":{"a":["six","am"],"b":"six am"}}')
    assert not accepts(grammar, '{"name":"F","arguments":{}}')
    assert not accepts(grammar, '{"name":"' + "f" * 49 + '","arguments":{}}')


@pytest.mark.parametrize("grammar", [call_grammar("six am"), call_grammar("six am " * MAX_LISTED), ANY_CALL])
def test_an_answer_that_repeats_itself_ends(grammar: str) -> None:
    pairs = [f'"a{number}":"six"' for number in range(8)]
    assert accepts(grammar, '{"name":"f","arguments":{' + ",".join(pairs[:7]) + "}}")
    assert not accepts(grammar, '{"name":"f","arguments":{' + ",".join(pairs) + "}}")
    assert accepts(grammar, '{"name":"f","arguments":{"a":["six","six","six","six"]}}')
    assert not accepts(grammar, '{"name":"f","arguments":{"a":["six","six","six","six","six"]}}')
