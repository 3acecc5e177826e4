"""Checks of semantic answers in a whole daemon: a share is made anew, and what differs raises the threshold."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("onnxruntime")

from edge_node.clock import system_clock
from edge_node.signals.semantic import SemanticAnswers, load_judge
from edge_node.storage.shadow import ShadowStore
from models.semantic.findings import Findings
from router.policy.compiled import parse_policy
from router.types import Message, Request

from .box import Box, running
from .test_semantic import ASKED, POLITE, SEMANTIC
from .test_shadow import metrics

CHECKED = SEMANTIC + "shadow: {share: 1.0, usd_per_day: 1.0}\n"


async def checks(box: Box) -> dict[str, float]:
    return metrics((await box.get("/metrics")).body.decode(), "causeway_edge_semantic_checks_total")


async def test_the_client_gets_the_new_answer_and_nothing_else_is_asked(tmp_path: Path) -> None:
    async with running(tmp_path, policy=CHECKED) as box:
        await box.ask(ASKED, temperature=0, tags="edge")
        body = {"model": "auto", "temperature": 0, "messages": [{"role": "user", "content": POLITE}]}
        async with box.session.post("/v1/route", json=body, headers={"x-causeway-tags": "edge"}) as response:
            assert (await response.json())["similarity"] > 0.5  # an explanation is not checked
        assert (await box.ask(POLITE, temperature=0, tags="edge")).headers["x-causeway-cache"] == "miss"
        assert await checks(box) == {'{result="agreed"}': 1.0}
        assert len(box.engine.calls) == 2
        assert (await box.ask(POLITE, temperature=0, tags="edge")).headers["x-causeway-cache"] == "hit"
        box.assert_nothing_leaks()


async def test_answers_that_differ_make_the_cache_stricter(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running(tmp_path, policy=CHECKED) as box:
        await box.ask(ASKED, temperature=0, tags="edge")
        box.engine.words = ("rain ", "until ", "seven")
        await box.ask(POLITE, temperature=0, tags="edge")
        assert await checks(box) == {'{result="disagreed"}': 1.0}
        assert "1 of 1 compared answers differ, more than max_error 0.01 explains" in caplog.text
        await box.ask("what is the weather in paris please", temperature=0, tags="edge")
        assert await checks(box) == {'{result="disagreed"}': 1.0}  # nothing is a match any more


async def test_private_and_sampled_answers_are_never_checked(tmp_path: Path) -> None:
    rule = "    when: request.temperature == 0.0\n    exact: {ttl: 30s, stale_if_error: 10m}\n    semantic"
    policy = CHECKED.replace(rule, rule.replace("when: request.temperature == 0.0", "allow_sampled: true"))
    assert policy != CHECKED
    async with running(tmp_path, policy=policy) as box:
        for tags, temperature in (("private", 0.0), ("edge", 0.7)):
            await box.ask(ASKED, tags=tags, temperature=temperature)
            second = await box.ask(POLITE, tags=tags, temperature=temperature)
            assert second.headers["x-causeway-cache"] == "semantic"
        assert await checks(box) == {}


async def test_the_budget_of_the_day_bounds_checks(tmp_path: Path) -> None:
    policy = CHECKED.replace("usd_per_day: 1.0", "usd_per_day: 0.005")  # one answer costs 0.01
    async with running(tmp_path, policy=policy) as box:
        await box.ask(ASKED, temperature=0, tags="cloud")
        assert (await box.ask(POLITE, temperature=0, tags="cloud")).headers["x-causeway-cache"] == "miss"
        third = await box.ask("what is the weather in paris please", temperature=0, tags="cloud")
        assert third.headers["x-causeway-cache"] == "semantic"
        assert await checks(box) == {'{result="agreed"}': 1.0}
        assert box.parts.spend.current.usd_today == pytest.approx(0.02)


async def test_what_was_found_holds_over_a_restart(tmp_path: Path) -> None:
    sha256 = load_judge(()).sha256
    store = ShadowStore(tmp_path, system_clock())
    await store.start(1)
    store.keep_findings(Findings(sha256, 1.0, 1, [100.0]))
    store.close()
    store = ShadowStore(tmp_path, system_clock())
    await store.start(1)
    assert store.earlier_findings == Findings(sha256, 1.0, 1, [100.0])
    store.close()


@pytest.mark.parametrize("active_first", [True, False])
@pytest.mark.parametrize("same_judge", [True, False], ids=["same judge", "another judge"])
def test_findings_of_an_earlier_run_hold_for_the_same_judge(active_first: bool, same_judge: bool) -> None:
    answers, policy = SemanticAnswers(), parse_policy(SEMANTIC)
    earlier = Findings(load_judge(()).sha256 if same_judge else "another", 1.0, 1, [100.0])
    if active_first:
        answers.activate(policy)
        answers.restore(earlier)
    else:
        answers.restore(earlier)
        answers.activate(policy)
    asked, polite = (
        answers.question(Request(kind="chat", model="auto", messages=(Message("user", text),)))
        for text in (ASKED, POLITE)
    )
    assert asked is not None
    assert polite is not None
    answers.add(b"", asked, b"key")
    assert (answers.find(b"", polite, 0.01) is None) == same_judge
