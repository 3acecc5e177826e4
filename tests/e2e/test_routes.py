"""Each answer names its route and reason, and the decision record agrees."""

from __future__ import annotations

import pytest

from tests.stack import Stack

from .requests import LONG, OUTSIDE, ask, get, record

pytestmark = [pytest.mark.triton, pytest.mark.engine]


def test_a_short_command_is_answered_on_the_device(stack: Stack) -> None:
    """The fast path: the INT4 model is confident enough, and the record has one attempt."""
    answer = ask(stack.edge_url, "set an alarm for seven am tomorrow", temperature=0)
    assert (answer.route, answer.target) == ("edge", "small")
    assert '"name":"alarm_' in answer.text
    decision_record = record(stack.edge_url, answer.id)
    assert decision_record["decision"]["rule"] == "fast-path"
    assert [(attempt["target"], attempt["state"]) for attempt in decision_record["outcome"]["attempts"]] == [
        ("small", "done")
    ]
    assert decision_record["outcome"]["attempts"][0]["confidence"]["score"] >= 0.55


def test_a_long_prompt_is_answered_by_triton(stack: Stack) -> None:
    """The record lists the rules that did not hold."""
    answer = ask(stack.edge_url, LONG, temperature=0)
    assert (answer.route, answer.target, answer.degraded) == ("cloud", "large", False)
    decision_record = record(stack.edge_url, answer.id)
    assert decision_record["decision"]["rule"] == "otherwise"
    assert ("rule_not_held", "fast-path") in {
        (reason["code"], reason["rule"]) for reason in decision_record["decision"]["reasons"]
    }
    assert decision_record["estimates"]["prompt_tokens"] >= 48


def test_a_repeated_request_is_answered_from_the_cache(stack: Stack) -> None:
    """The text is the same, the id is new."""
    first = ask(stack.edge_url, LONG + " please", temperature=0)
    again = ask(stack.edge_url, LONG + " please", temperature=0)
    assert (first.cache, again.cache, again.route) == ("miss", "hit", "cache")
    assert again.text == first.text
    assert again.id != first.id
    assert record(stack.edge_url, again.id)["outcome"]["attempts"] == []


def test_a_prompt_outside_the_device_models_domain_is_handed_off(stack: Stack) -> None:
    """The device starts with low confidence; the client sees only the cloud's answer."""
    answer = ask(stack.edge_url, OUTSIDE, temperature=0)
    direct = ask(stack.edge_url, OUTSIDE, model="large", temperature=0)
    assert (answer.route, answer.target, answer.degraded) == ("cloud", "large", False)
    assert answer.text == direct.text
    outcome = record(stack.edge_url, answer.id)["outcome"]
    assert [(attempt["target"], attempt["state"]) for attempt in outcome["attempts"]] == [
        ("small", "handed_off"),
        ("large", "done"),
    ]
    assert outcome["attempts"][0]["confidence"]["score"] < 0.55


def test_models_and_decisions_are_listed(stack: Stack) -> None:
    names = {model["id"] for model in get(f"{stack.edge_url}/v1/models")["data"]}
    assert {"auto", "small", "large"} <= names
    answer = ask(stack.edge_url, "play some jazz", temperature=0)
    listed = get(f"{stack.edge_url}/v1/decisions")
    assert answer.id in [entry["id"] for entry in listed["data"]]


def test_records_and_logs_hold_no_prompt(stack: Stack) -> None:
    ask(stack.edge_url, "play the forbidden zanzibar song", temperature=0)
    listed = str(get(f"{stack.edge_url}/v1/decisions"))
    logs = "".join(part.log.read_text() for part in stack.parts.values())
    assert "zanzibar" not in listed
    assert "zanzibar" not in logs
