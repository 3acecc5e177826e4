"""Answers constrained by a grammar or a schema: valid, whatever the model would rather say."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

import pytest

from causeway_server.models.llama_cpp.protocol import Prompt
from causeway_server.models.llama_cpp.sampler import GrammarCompiler, GrammarState
from causeway_server.router.types import Sampling

from ..conftest import TIMEOUT_S, Rig
from ..tiny_gguf import CONTROL

COMMAND = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"enum": ["light_on", "light_off"]},
            "level": {"type": "integer", "minimum": 0, "maximum": 10},
            "room": {"type": "string", "maxLength": 8},
            "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
            "note": {"type": ["string", "null"], "maxLength": 5},
            "where": {"$ref": "#/$defs/where"},
        },
        "required": ["name", "level", "room", "tags", "note", "where"],
        "additionalProperties": False,
        "$defs": {"where": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
    }
)


@pytest.mark.parametrize("seed", range(12))
def test_a_schema_s_answers_are_valid(rig: Rig, seed: int) -> None:
    """Sampled from a model of random weights."""
    answer = rig.run("hello", json_schema=COMMAND, sampling=Sampling(seed=seed), max_tokens=300)
    assert answer.end.finish_reason == "stop"
    value = json.loads(answer.text)
    assert value["name"] in ("light_on", "light_off")
    assert 0 <= value["level"] <= 10
    assert len(value["room"]) <= 8
    assert 1 <= len(value["tags"]) <= 3
    assert all(isinstance(tag, bool) for tag in value["tags"])
    assert value["note"] is None or len(value["note"]) <= 5
    assert isinstance(value["where"]["x"], (int, float))


@pytest.mark.parametrize("seed", range(6))
def test_any_object_is_an_object(rig: Rig, seed: int) -> None:
    """Finished answers parse, unfinished ones are the beginning of an object."""
    answer = rig.run("hello", json_schema="{}", sampling=Sampling(seed=seed), max_tokens=150)
    assert answer.text.startswith("{")
    if answer.end.finish_reason == "stop":
        assert isinstance(json.loads(answer.text), dict)


def test_greedy_answers_obey_a_schema(rig: Rig) -> None:
    schema = '{"type":"object","properties":{"a":{"type":"boolean"}},"required":["a"],"additionalProperties":false}'
    value = json.loads(rig.run("hello", json_schema=schema, max_tokens=40).text)
    assert isinstance(value["a"], bool)


def test_control_tokens_do_not_fill_a_grammar_s_text(rig: Rig) -> None:
    """A control token's name would match a string, but is never text."""
    sampling = Sampling(temperature=0.0, logit_bias=((CONTROL.index("<|user|>"), 1000.0),))
    answer = rig.run("hello", grammar='start: "<|user|>"', sampling=sampling, max_tokens=30)
    assert answer.text == "<|user|>"


def test_penalties_and_bias_work_under_a_grammar(rig: Rig) -> None:
    letter = int(rig.engine.core.vocabulary.encode("c", special=False)[0])
    sampling = Sampling(temperature=0.0, logit_bias=((letter, 1000.0),), presence_penalty=0.1)
    assert rig.run("hello", grammar="start: /[a-d]{3}/", sampling=sampling).text == "ccc"


def test_logprobs_and_confidence_work_under_a_grammar(rig: Rig) -> None:
    """They are the model's own, for tokens that the grammar forced."""
    answer = rig.run("hello", grammar='start: "zz"', logprobs=1, confidence_tokens=2)
    assert len(answer.logprobs) == 2
    assert answer.confidences[-1].score < 0.5


def test_a_schema_that_cannot_be_obeyed_is_an_error(rig: Rig) -> None:
    end = rig.run("hello", json_schema='{"type":"unknown"}').end
    assert end.error == "invalid_schema"


@pytest.mark.parametrize("grammar", ["start: nowhere", 'start: "unclosed', "nothing", 'other ::= "a"'])
def test_a_grammar_that_llama_cpp_cannot_read_is_an_error(rig: Rig, grammar: str) -> None:
    """The next answer is not affected."""
    assert rig.run("hello", grammar=grammar).end.error == "invalid_schema"
    assert rig.run("hello").end.error == ""


def test_a_grammar_that_no_token_continues_ends_the_answer(rig: Rig) -> None:
    other = rig.start("hello", max_tokens=60, ignore_eos=True)
    answer = rig.run(Prompt(text="hello"), grammar='start: "a" NOTHING\nNOTHING: /b/ & /c/')
    assert answer.end.error == "invalid_schema"
    assert "no token of this model" in answer.end.detail
    assert rig.answer(other).end.completion_tokens == 60


def test_a_schema_that_compiles_for_long_delays_no_other_answer(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a free one nor one that is held to its text; the schema's own comes when its grammar is there."""
    begun, go_on = threading.Event(), threading.Event()
    compile_now = GrammarCompiler.compile

    def compile_late(self: GrammarCompiler, grammar: str, *, keep: bool = True) -> GrammarState:
        if "story" in grammar:
            begun.set()
            assert go_on.wait(TIMEOUT_S)
        return compile_now(self, grammar, keep=keep)

    monkeypatch.setattr(GrammarCompiler, "compile", compile_late)  # how long it takes is what is under test
    rig = make_rig()
    late = rig.start("hello", json_schema='{"enum": [{"story": 1}]}', max_tokens=40)
    assert begun.wait(TIMEOUT_S)
    try:
        assert rig.run("hello", max_tokens=8).end.finish_reason == "length"
        assert rig.run("hello", copy_source="wake me up", max_tokens=200).end.finish_reason
        assert not rig.finished(late)
    finally:
        go_on.set()
    assert json.loads(rig.answer(late).text) == {"story": 1}
