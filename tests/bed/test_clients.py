"""The scripted model of the clients' bed: it is as strict as vendors are, and streams what it answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.bed.clients.upstream import answer, deltas, fault_of

ASK = {"role": "user", "content": "What is the weather?"}
WEATHER = {"type": "function", "function": {"name": "get_weather"}}
SAVE = {"type": "function", "function": {"name": "save"}}


def called(*ids: str) -> dict[str, Any]:
    calls = [{"id": one, "type": "function", "function": {"name": "get_weather", "arguments": "{}"}} for one in ids]
    return {"role": "assistant", "tool_calls": calls}


def result(call_id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": "21"}


@pytest.mark.parametrize(
    ("messages", "wrong"),
    [
        ([ASK, called("a", "b"), result("b"), result("a")], ""),
        ([ASK, called("a", "a"), result("a"), result("a")], "twice"),
        ([ASK, called("a"), result("a"), ASK, called("a"), result("a")], "twice"),
        ([ASK, called("a", "b"), result("a")], "no result"),
        ([ASK, called("a"), ASK], "no result"),
        ([ASK, called("a"), result("b")], "answers no call"),
    ],
)
def test_histories_with_wrong_call_ids_are_refused(messages: list[dict[str, Any]], wrong: str) -> None:
    fault = fault_of(messages)
    assert wrong in fault
    assert bool(fault) == bool(wrong)


def test_tools_come_first_and_the_report_in_the_form_that_is_asked_for() -> None:
    done = [ASK, called("a"), result("a")]
    names = [
        [call["function"]["name"] for call in answer(body, "call")["tool_calls"]]
        for body in ({"messages": [ASK], "tools": [WEATHER, SAVE]}, {"messages": done, "tools": [WEATHER, SAVE]})
    ]
    assert names == [["get_weather", "get_weather"], ["save"]]
    form = {"type": "json_object"}
    assert json.loads(answer({"messages": done, "tools": [WEATHER], "response_format": form}, "call")["content"])
    assert answer({"messages": [*done, ASK], "tools": [WEATHER]}, "call")["tool_calls"]


def test_the_pieces_of_a_stream_are_the_whole_answer() -> None:
    message = answer({"messages": [ASK], "tools": [WEATHER]}, "call")
    arguments = ["", ""]
    for call in (call for delta in deltas(message) for call in delta.get("tool_calls", ())):
        arguments[call["index"]] += call["function"]["arguments"]
    assert arguments == [call["function"]["arguments"] for call in message["tool_calls"]]
    text = answer({"messages": [ASK]}, "call")
    assert "".join(delta.get("content") or "" for delta in deltas(text)) == text["content"]
