"""The explanation on a terminal: every reason has a text, absent signals are named, nothing is repeated."""

from __future__ import annotations

import io
from typing import get_args

import msgspec
import pytest
from rich.console import Console
from rich.text import Text

from causeway_server.router.checks.explanation import RouteExplanation, explain
from causeway_server.router.types import (
    AttemptPlan,
    CachePlan,
    CloudSignals,
    Decision,
    DeviceSignals,
    EdgeSignals,
    EnergySignals,
    Estimates,
    ExactCache,
    Handoff,
    Reason,
    ReasonCode,
    SemanticCache,
    Shadow,
    Snapshot,
    Target,
)

SMALL = Target("small", "edge", "assistant")
LARGE = Target("large", "cloud", "assistant-large")


def printed(**fields: object) -> str:
    decision = Decision("default", "9f2c", "fast-path", (AttemptPlan(SMALL, Handoff(8, 0.55)), AttemptPlan(LARGE)))
    explanation = RouteExplanation(
        cache=CachePlan(bypass="the request offers tools"),
        decision=decision,
        estimates=Estimates(prompt_tokens=5, quality=0.25),
        snapshot=Snapshot(),
    )
    console = Console(width=120, file=io.StringIO())
    for line in explain(msgspec.structs.replace(explanation, **fields)):
        console.print(Text.assemble(*line))
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("code", get_args(ReasonCode))
def test_every_reason_has_a_text(code: ReasonCode) -> None:
    """A text, not its code."""
    reason = Reason(code, rule="a-rule", target="a-target", detail="a-detail")
    text = printed(decision=Decision("p", "r", "", (), (reason,)))
    assert "a-rule" in text
    assert code not in text


def test_parts_are_named_with_the_form_in_which_a_target_gets_them() -> None:
    plan = AttemptPlan(SMALL, facts=("audio",), soft=("image",), fusion="hybrid")
    text = printed(decision=Decision("default", "9f2c", "fast-path", (plan,)))
    assert "hybrid fusion: audio as text, image as soft tokens" in text


def test_attempts_are_numbered_and_a_handoff_is_described() -> None:
    text = printed()
    assert text.index("1.  small  edge") < text.index("2.  large  cloud")
    assert "handoff if confidence is below 0.55 after 8 tokens" in text


def test_without_attempts_it_names_the_status_and_the_reason() -> None:
    reasons = (Reason("no_route", rule="private-stays"),)
    text = printed(decision=Decision("p", "r", "", (), reasons, on_device=True))
    assert "503" in text
    assert "no target is left" in text
    assert "bound to the device" in text


@pytest.mark.parametrize(
    ("regions", "words"), [(("eu", "ch"), "bound to eu, ch"), ((), "bound to no region"), (None, "")]
)
def test_the_regions_that_bind_a_request_are_named(regions: tuple[str, ...] | None, words: str) -> None:
    text = printed(decision=Decision("p", "r", "x", (AttemptPlan(LARGE),), regions=regions))
    assert ("bound to" in text) == bool(words)
    assert words in text


def test_an_absent_signal_is_named() -> None:
    reason = Reason("signal_absent", rule="hot", detail="device.temperature_c")
    assert "device.temperature_c cannot be read" in printed(decision=Decision("p", "r", "x", (), (reason,)))


def test_the_cache_is_a_hit_a_miss_or_unused() -> None:
    assert "hit: an answer 3.5 s old" in printed(cached_age_s=3.5)
    similar = printed(cached_age_s=3.5, similarity=0.912)
    assert "semantic: an answer 3.5 s old to a question of similarity 0.91" in similar
    plan = CachePlan(exact=ExactCache(30.0), semantic=SemanticCache(20.0))
    assert "fresh for 30 s, and 20 s for questions with the same meaning" in printed(cache=plan)
    assert "would be fresh for 30 s" in printed(cache=CachePlan(ExactCache(30.0)))
    assert "bypass: the request offers tools" in printed()


def test_a_shadow_request_is_announced() -> None:
    assert "shadow" not in printed()
    decision = Decision("p", "r", "x", (AttemptPlan(SMALL), AttemptPlan(LARGE)), shadow=Shadow(0.01, 2.5, 0.1))
    assert "also asked after a share of 0.01 of such answers, for at most 2.5 USD a day" in printed(decision=decision)


def test_a_constraint_is_shown_once() -> None:
    """The cache plan repeats it."""
    held = Reason("constraint_held", rule="private-stays")
    text = printed(decision=Decision("p", "r", "x", (), (held,)), cache=CachePlan(reasons=(held,)))
    assert text.count("private-stays") == 1


def test_signals_with_a_value_are_shown_under_their_names() -> None:
    snapshot = Snapshot(
        device=DeviceSignals(memory_free_mb=14370.4, cpu=0.256, throttled=False), edge=EdgeSignals(queue=0)
    )
    text = printed(snapshot=snapshot)
    assert "memory_free_mb 14370, cpu 0.256" in text
    assert "throttled false" in text
    assert "prompt_tokens 5" in text
    assert "queue 0, quality 0.25" in text
    assert "temperature_c" not in text
    assert "spend" not in text
    assert "energy" not in text
    paid = EnergySignals(price=7.0, limit="heat", token_wh=0.0001)
    assert "energy   price 7, limit heat, token_wh 0.0001" in printed(snapshot=Snapshot(energy=paid))


def test_each_of_several_clouds_has_its_signals_under_its_own_name() -> None:
    """One alone is `cloud`, which is shown anyway."""
    eu, us = CloudSignals(rtt_ms=20.0), CloudSignals(rtt_ms=110.0, breaker="open")
    text = printed(snapshot=Snapshot(cloud=eu, clouds={"eu": eu, "us": us}))
    assert "cloud.eu" in text
    (line,) = [line for line in text.splitlines() if "cloud.us" in line]
    assert "rtt_ms 110, breaker open" in line
    assert "cloud.eu" not in printed(snapshot=Snapshot(cloud=eu, clouds={"eu": eu}))


def test_markup_in_a_message_is_text() -> None:
    """A policy's names may hold brackets."""
    reason = Reason("rule_failed", rule="[red]x[/red]", detail="no such key [0]")
    assert "[red]x[/red]" in printed(decision=Decision("p", "r", "[b]", (), (reason,)))
