"""Calls as JSON, slots located in a text, and scoring."""

from __future__ import annotations

import pytest

from causeway_train.function_calls.call import FunctionCall, expected_call, parse_call, score_answer, slot_spans
from causeway_train.function_calls.dataset import Row, is_held_out

ALARM = Row(
    text="wake me at six am on monday",
    intent="alarm_set",
    slots=(("date", "monday"), ("time", "six am")),
    source="hwu64",
)


def test_the_expected_call_has_its_arguments_in_text_order() -> None:
    assert expected_call(ALARM) == FunctionCall("alarm_set", {"time": "six am", "date": "monday"})
    assert list(expected_call(ALARM).arguments) == ["time", "date"]


def test_an_argument_that_occurs_twice_is_a_list() -> None:
    row = Row(
        text="add milk and eggs", intent="lists_createoradd", slots=(("item", "milk"), ("item", "eggs")), source="hwu64"
    )
    assert expected_call(row).arguments == {"item": ["milk", "eggs"]}


def test_snips_names_become_snake_case() -> None:
    row = Row(text="weather for May", intent="GetWeather", slots=(("timeRange", "May"),), source="snips2017")
    assert expected_call(row) == FunctionCall("weather_get", {"time_range": "May"})


def test_values_are_found_on_word_boundaries_and_never_twice() -> None:
    """`to` is the word, not the start of `today`; equal values take different places."""
    row = Row(text="today take one to one", intent="x", slots=(("a", "to"), ("b", "one"), ("c", "one")))
    assert slot_spans(row) == ((11, 14, "b"), (15, 17, "a"), (18, 21, "c"))
    assert slot_spans(Row(text="nothing here", intent="x", slots=(("a", "else"),))) is None


@pytest.mark.parametrize(
    ("answer", "valid", "intent", "exact"),
    [
        ('{"name":"alarm_set","arguments":{"time":"six am","date":"monday"}}', True, True, True),
        ('{"name": "alarm_set", "arguments": {"date": "monday", "time": "six am"}}', True, True, True),
        ('{"name":"alarm_set","arguments":{"time":"six am"}}', True, True, False),
        ('{"name":"alarm_set","arguments":{"time":"Six am","date":"monday"}}', True, True, False),
        ('{"name":"alarm_set","arguments":{"time":"six am","date":"monday","person":"me"}}', True, True, False),
        ('{"name":"alarm_query","arguments":{"time":"six am","date":"monday"}}', True, False, False),
        ('{"name":"alarm_set","arguments":{"time":"six am"', False, False, False),
        ('{"name":"alarm_set","arguments":{},"more":1}', False, False, False),
        ("six am it is", False, False, False),
        ("", False, False, False),
    ],
)
def test_scores(answer: str, valid: bool, intent: bool, exact: bool) -> None:
    """Exact means the function and every argument, spelt the same, in any order."""
    result = score_answer(answer, ALARM)
    assert (result.valid, result.intent, result.exact) == (valid, intent, exact)


def test_a_merged_clinc_intent_accepts_each_of_its_functions() -> None:
    """CLINC150 has no slots: arguments do not count."""
    row = Row(text="is it raining", intent="weather", source="clinc150")
    assert score_answer('{"name":"weather_get","arguments":{"city":"Oslo"}}', row).exact
    assert score_answer('{"name":"weather_query","arguments":{}}', row).exact
    assert not score_answer('{"name":"alarm_set","arguments":{}}', row).intent


def test_parse_call_returns_none_for_anything_else() -> None:
    assert parse_call('{"name":"x","arguments":{"a":["b","c"]}}') == FunctionCall("x", {"a": ["b", "c"]})
    assert parse_call('{"name":"x","arguments":{"a":[1]}}') is None
    assert parse_call("[]") is None


def test_the_split_follows_the_text_alone() -> None:
    """Duplicates in other casing stay together; about a tenth is held out; another seed gives another split."""
    texts = [f"set the light to {n}" for n in range(2000)]
    held = [text for text in texts if is_held_out(text)]
    assert 140 < len(held) < 260
    assert all(is_held_out(f" {text.upper()} ") for text in held)
    assert held != [text for text in texts if is_held_out(text, "another seed")]
