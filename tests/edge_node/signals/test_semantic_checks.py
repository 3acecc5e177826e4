"""Checks of semantic answers in a whole daemon: a share is made again, and what differs raises the threshold."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

pytest.importorskip("onnxruntime")

from causeway_server.edge_node.clock import system_clock
from causeway_server.edge_node.config.schema import KeyConfig, ServerConfig
from causeway_server.edge_node.signals.semantic import SemanticAnswers, load_judge
from causeway_server.edge_node.storage.shadow import ShadowStore
from causeway_server.models.semantic.judge import Findings
from causeway_server.router.policy.compiled import parse_policy
from causeway_server.router.types import Message, Outcome, Request
from tests.edge_node.serving.test_shadow import metrics
from tests.waiting import until

from ..device import Device, running
from .test_semantic import ASKED, POLITE, SEMANTIC

CHECKED = SEMANTIC + "shadow: {share: 1.0, usd_per_day: 1.0}\n"


async def checks(device: Device) -> dict[str, float]:
    return metrics((await device.get("/metrics")).body.decode(), "causeway_edge_semantic_checks_total")


async def test_the_client_gets_the_new_answer_and_nothing_else_is_asked(tmp_path: Path) -> None:
    async with running(tmp_path, policy=CHECKED) as device:
        await device.ask(ASKED, temperature=0, tags="edge")
        body = {"model": "auto", "temperature": 0, "messages": [{"role": "user", "content": POLITE}]}
        async with device.session.post("/v1/route", json=body, headers={"x-causeway-tags": "edge"}) as response:
            assert (await response.json())["similarity"] > 0.5  # an explanation is not checked
        assert (await device.ask(POLITE, temperature=0, tags="edge")).headers["x-causeway-cache"] == "miss"
        assert await checks(device) == {'{result="agreed"}': 1.0}
        assert len(device.engine.calls) == 2
        assert (await device.ask(POLITE, temperature=0, tags="edge")).headers["x-causeway-cache"] == "hit"
        device.assert_nothing_leaks()


async def test_answers_that_differ_make_the_cache_stricter(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running(tmp_path, policy=CHECKED) as device:
        await device.ask(ASKED, temperature=0, tags="edge")
        device.engine.words = ("rain ", "until ", "seven")
        await device.ask(POLITE, temperature=0, tags="edge")
        assert await checks(device) == {'{result="disagreed"}': 1.0}
        assert "1 of 1 compared answers differ, which is more than max_error 0.01" in caplog.text
        await device.ask("what is the weather in paris please", temperature=0, tags="edge")
        assert await checks(device) == {'{result="disagreed"}': 1.0}  # nothing is a match any more


async def test_private_and_sampled_answers_are_never_checked(tmp_path: Path) -> None:
    rule = "    when: request.temperature == 0.0\n    exact: {ttl: 30s, stale_if_error: 10m}\n    semantic"
    policy = CHECKED.replace(rule, rule.replace("when: request.temperature == 0.0", "allow_sampled: true"))
    assert policy != CHECKED
    async with running(tmp_path, policy=policy) as device:
        for tags, temperature in (("private", 0.0), ("edge", 0.7)):
            await device.ask(ASKED, tags=tags, temperature=temperature)
            second = await device.ask(POLITE, tags=tags, temperature=temperature)
            assert second.headers["x-causeway-cache"] == "semantic"
        assert await checks(device) == {}


@pytest.mark.slow
async def test_the_budget_of_the_day_bounds_checks(tmp_path: Path) -> None:
    policy = CHECKED.replace("usd_per_day: 1.0", "usd_per_day: 0.005")  # one answer costs 0.01
    async with running(tmp_path, policy=policy) as device:
        await device.ask(ASKED, temperature=0, tags="cloud")
        assert (await device.ask(POLITE, temperature=0, tags="cloud")).headers["x-causeway-cache"] == "miss"
        await until(lambda: (device.parts.spend.current.usd_today or 0.0) > 0.015)  # counted after the answer
        third = await device.ask("what is the weather in paris please", temperature=0, tags="cloud")
        assert third.headers["x-causeway-cache"] == "semantic"
        assert await checks(device) == {'{result="agreed"}': 1.0}
        assert device.parts.spend.current.usd_today == pytest.approx(0.02)


async def test_what_was_found_holds_over_a_restart(tmp_path: Path) -> None:
    sha256 = load_judge(()).sha256
    store = ShadowStore(tmp_path, system_clock())
    await store.restore(1)
    store.keep_findings(Findings(sha256, 1.0, 1, [100.0]))
    store.close()
    store = ShadowStore(tmp_path, system_clock())
    await store.restore(1)
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


# A route with one target each, and requests that no route takes.
ONE_EACH = (
    CHECKED.replace("use: [large, small]", "use: [large]")
    .replace("  - name: edge-first", "  - name: edge-first\n    when: '!(\"nowhere\" in request.tags)'")
    .replace("m-large\n    first_token_timeout: 20s", "m-large\n    first_token_timeout: 10s")
)


async def cloud_away(device: Device) -> None:
    device.cloud.fault = "refuse"


async def cloud_stalls(device: Device) -> None:
    device.cloud.fault = "stall"


async def cloud_fails(device: Device) -> None:
    device.cloud.status = 500


async def cloud_rejects(device: Device) -> None:
    device.cloud.status, device.cloud.error = 400, {"message": "no", "type": "invalid_request_error"}


async def breaker_open(device: Device) -> None:
    device.cloud.fault = "refuse"
    for _ in range(5):
        assert (await device.ask("again", temperature=0.7, tags="cloud")).status in (502, 503)
    device.cloud.bodies.clear()


async def cloud_full(device: Device) -> None:
    device.cloud.status, device.cloud.headers = 503, {"Retry-After": "30"}


async def engine_dead(device: Device) -> None:
    device.engine.fault = "refuse"


async def engine_bug(device: Device) -> None:
    device.engine.fault = "corrupt"


async def nothing(device: Device) -> None:
    """The tags alone make the request fail."""


# How the new answer fails, with the request's tags, the error's code, and those of its attempts.
FAILURES: list[tuple[Callable[[Device], Awaitable[None]], str, str, list[str]]] = [
    (cloud_away, "cloud", "all_attempts_failed", ["cloud_disconnected"]),
    (cloud_stalls, "cloud", "all_attempts_failed", ["cloud_timeout"]),
    (cloud_fails, "cloud", "all_attempts_failed", ["cloud_failed"]),
    (cloud_rejects, "cloud", "invalid_value", ["invalid_value"]),
    (breaker_open, "cloud", "all_attempts_failed", ["breaker_open"]),
    (cloud_full, "cloud", "queue_full", ["cloud_saturated"]),
    (engine_dead, "edge", "all_attempts_failed", ["engine_unavailable"]),
    (engine_bug, "edge", "all_attempts_failed", ["backend_error"]),
    (nothing, "nowhere", "no_route", []),
]


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("fail", "tags", "code", "errors"), FAILURES, ids=[one[0].__name__ for one in FAILURES])
async def test_a_check_that_fails_costs_nobody_the_answer(
    tmp_path: Path, fail: Callable[[Device], Awaitable[None]], tags: str, code: str, errors: list[str], stream: bool
) -> None:
    """The client gets the cached answer; the record has the failed attempts; nothing agreed or disagreed."""
    async with running(tmp_path, policy=ONE_EACH) as device:
        first = await device.ask(ASKED, temperature=0, tags=tags.replace("nowhere", "edge"))
        await fail(device)
        # The deadline is for the stall alone: the cached answer is sent before it.
        headers = {"x-causeway-deadline-ms": "1000"} if fail is cloud_stalls else {}
        second = await device.ask(POLITE, temperature=0, tags=tags, stream=stream, headers=headers)
        assert (second.status, second.text) == (200, first.text)
        assert second.headers["x-causeway-cache"] == "semantic"
        assert second.headers["x-causeway-route"] == "cache"
        assert second.headers["x-causeway-reason"] == f"check: {code}"
        assert second.headers["x-causeway-degraded"] == "false"
        outcome = (await device.record(second)).outcome
        assert (outcome.status, outcome.error, outcome.cache, outcome.degraded) == ("ok", "", "semantic", False)
        assert outcome.similarity is not None
        assert outcome.cache_age_s is not None
        assert [attempt.error for attempt in outcome.attempts] == errors
        assert outcome.finish_reason == "stop"
        assert await checks(device) == {'{result="failed"}': 1.0}
        await until(lambda: device.cloud.running == 0)
        device.assert_nothing_leaks()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_degraded_answer_is_no_check(tmp_path: Path, stream: bool) -> None:
    """Neither one of a fallback, nor one that skips a target that is down, nor one that the cloud itself degraded."""
    async with running(tmp_path, policy=CHECKED) as device:
        first = await device.ask(ASKED, temperature=0, tags="cloud")

        async def ask() -> Outcome:
            answer = await device.ask(POLITE, temperature=0, tags="cloud", stream=stream)
            assert (answer.headers["x-causeway-cache"], answer.text) == ("semantic", first.text)
            return (await device.record(answer)).outcome

        device.cloud.headers = {"x-causeway-degraded": "true"}
        assert [attempt.error for attempt in (await ask()).attempts] == ["backend_error"]
        device.cloud.headers, device.cloud.fault = {}, "refuse"
        while (outcome := await ask()).attempts:  # until the circuit breaker opens
            assert [attempt.error for attempt in outcome.attempts] == ["cloud_disconnected"]
        assert (outcome.reason, outcome.attempts) == ("check: breaker_open", ())
        assert all(call.is_shadow for call in device.engine.calls)
        assert set(await checks(device)) == {'{result="failed"}'}


async def test_a_stream_that_breaks_after_its_beginning_stays_broken(tmp_path: Path) -> None:
    """The client has bytes of the new answer: no other may follow."""
    async with running(tmp_path, policy=ONE_EACH) as device:
        await device.ask(ASKED, temperature=0, tags="cloud")
        device.cloud.fault = "die"
        second = await device.ask(POLITE, temperature=0, tags="cloud", stream=True)
        assert second.headers["x-causeway-cache"] == "miss"
        assert "error" in second.events[-1]
        assert await checks(device) == {}
        third = await device.ask(POLITE, temperature=0, tags="cloud")  # a whole answer has no beginning
        assert third.headers["x-causeway-cache"] == "semantic"


async def test_clients_that_share_a_check_each_get_the_answer(tmp_path: Path) -> None:
    async with running(tmp_path, policy=ONE_EACH) as device:
        first = await device.ask(ASKED, temperature=0, tags="cloud")
        device.cloud.gate, device.cloud.status = asyncio.Event(), 500
        device.cloud.entered.clear()
        asking = [asyncio.create_task(device.ask(POLITE, temperature=0, tags="cloud")) for _ in range(2)]
        await until(lambda: device.parts.shared_generations.subscribers == 2)
        device.cloud.gate.set()
        for answer in await asyncio.gather(*asking):
            assert (answer.headers["x-causeway-cache"], answer.text) == ("semantic", first.text)
        assert len(device.cloud.bodies) == 2


async def test_a_client_without_a_cached_answer_is_not_bound_by_anothers_check(tmp_path: Path) -> None:
    """The check gives up where the fallback answers, degraded; the client that shared it then asks for itself."""
    keys = tuple(KeyConfig(name, hashlib.sha256(name.encode()).hexdigest()) for name in ("ann", "bob"))
    async with running(tmp_path, policy=CHECKED, server=ServerConfig(port=0, keys=keys)) as device:
        ann, bob = ({"Authorization": f"Bearer {name}"} for name in ("ann", "bob"))
        first = await device.ask(ASKED, temperature=0, tags="cloud", headers=ann)
        device.cloud.gate, device.cloud.status = asyncio.Event(), 500
        checked = asyncio.create_task(device.ask(POLITE, temperature=0, tags="cloud", headers=ann))
        await until(lambda: device.parts.shared_generations.subscribers == 1)
        other = asyncio.create_task(device.ask(POLITE, temperature=0, tags="cloud", headers=bob))
        await until(lambda: device.parts.shared_generations.subscribers == 2)
        device.cloud.gate.set()
        assert ((await checked).headers["x-causeway-cache"], (await checked).text) == ("semantic", first.text)
        assert ((await other).status, (await other).headers["x-causeway-degraded"]) == (200, "true")


async def test_a_check_does_not_queue(tmp_path: Path) -> None:
    """With every permit held the cached answer is given at once."""
    policy = CHECKED.replace("limits: {concurrent: 4, queue: 4}", "limits: {concurrent: 1, queue: 4}")
    async with running(tmp_path, policy=policy) as device:
        await device.ask(ASKED, temperature=0, tags="edge")
        device.cloud.gate = asyncio.Event()
        running_one = asyncio.create_task(device.ask("long work", temperature=0.7, tags="cloud"))
        await until(lambda: not device.parts.admission.has_room)
        second = await device.ask(POLITE, temperature=0, tags="edge")
        assert (second.headers["x-causeway-cache"], second.headers["x-causeway-reason"]) == ("semantic", "cache")
        device.cloud.gate.set()
        assert (await running_one).status == 200


async def test_what_a_failed_check_cost_counts_against_the_budget(tmp_path: Path) -> None:
    """An answer that breaks after some tokens was paid for."""
    policy = ONE_EACH.replace("usd_per_day: 1.0", "usd_per_day: 0.0001")
    async with running(tmp_path, policy=policy) as device:
        await device.ask(ASKED, temperature=0, tags="cloud")
        device.cloud.fault = "die"
        broken = await device.ask(POLITE, temperature=0, tags="cloud", stream=True)
        assert "error" in broken.events[-1]
        again = await device.ask(POLITE, temperature=0, tags="cloud")
        assert (again.headers["x-causeway-cache"], again.headers["x-causeway-reason"]) == ("semantic", "cache")
