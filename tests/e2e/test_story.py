"""Each answer says where it came from and why, and the record tells the same story."""

from __future__ import annotations

import pytest

from tests.stack import Stack

from .asking import LONG, OUTSIDE, ask, get, record

pytestmark = [pytest.mark.triton, pytest.mark.engine]


def test_a_short_command_is_answered_on_the_device(stack: Stack) -> None:
    """The fast path: the INT4 model answers, sure enough to keep it, and the record has one attempt."""
    asked = ask(stack.edge_url, "set an alarm for seven am tomorrow", temperature=0)
    assert (asked.route, asked.target) == ("edge", "small")
    assert '"name":"alarm_' in asked.text
    told = record(stack.edge_url, asked.id)
    assert told["decision"]["rule"] == "fast-path"
    assert [(a["target"], a["state"]) for a in told["outcome"]["attempts"]] == [("small", "done")]
    assert told["outcome"]["attempts"][0]["confidence"]["score"] >= 0.55


def test_a_long_ask_is_answered_by_triton(stack: Stack) -> None:
    """Beyond the fast path the cloud's model answers, and the record says which rules were tried before."""
    asked = ask(stack.edge_url, LONG, temperature=0)
    assert (asked.route, asked.target, asked.degraded) == ("cloud", "large", False)
    told = record(stack.edge_url, asked.id)
    assert told["decision"]["rule"] == "otherwise"
    assert ("rule_not_held", "fast-path") in {(r["code"], r["rule"]) for r in told["decision"]["reasons"]}
    assert told["estimates"]["prompt_tokens"] >= 48


def test_the_same_ask_again_comes_from_the_cache(stack: Stack) -> None:
    """The second answer is the first one's text under its own id, whole and streamed."""
    first = ask(stack.edge_url, LONG + " please", temperature=0)
    again = ask(stack.edge_url, LONG + " please", temperature=0)
    assert (first.cache, again.cache, again.route) == ("miss", "hit", "cache")
    assert again.text == first.text
    assert again.id != first.id
    assert record(stack.edge_url, again.id)["outcome"]["attempts"] == []


def test_an_ask_outside_the_device_models_domain_is_handed_off(stack: Stack) -> None:
    """It starts on the device, whose first tokens are not sure; the client sees the cloud's answer alone."""
    asked = ask(stack.edge_url, OUTSIDE, temperature=0)
    direct = ask(stack.edge_url, OUTSIDE, model="large", temperature=0)
    assert (asked.route, asked.target, asked.degraded) == ("cloud", "large", False)
    assert asked.text == direct.text
    told = record(stack.edge_url, asked.id)["outcome"]
    assert [(a["target"], a["state"]) for a in told["attempts"]] == [("small", "handed_off"), ("large", "done")]
    assert told["attempts"][0]["confidence"]["score"] < 0.55


def test_route_explains_without_running(stack: Stack) -> None:
    """`/v1/models` names the policy's targets, and the decision list holds what was asked."""
    names = {model["id"] for model in get(f"{stack.edge_url}/v1/models")["data"]}
    assert {"auto", "small", "large"} <= names
    asked = ask(stack.edge_url, "play some jazz", temperature=0)
    listed = get(f"{stack.edge_url}/v1/decisions")
    assert asked.id in [entry["id"] for entry in listed["data"]]


def test_no_record_holds_what_was_asked(stack: Stack) -> None:
    """Records and logs tell the route and never the words."""
    ask(stack.edge_url, "play the forbidden zanzibar song", temperature=0)
    listed = str(get(f"{stack.edge_url}/v1/decisions"))
    logs = "".join(part.log.read_text() for part in stack.parts.values())
    assert "zanzibar" not in listed
    assert "zanzibar" not in logs
