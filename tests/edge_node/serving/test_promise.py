"""A promise of quality in a whole daemon: labels open it, a fall closes it, and a restart forgets nothing."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest

pytest.importorskip("onnxruntime")

from causeway_server.router.types import PromiseSignals

from ..device import POLICY, Answer, Device, running
from .test_shadow import metrics

pytestmark = pytest.mark.slow

PROMISED = (
    POLICY.replace(
        "  - name: edge-first\n    use: [small, large]\n",
        "  - name: edge-first\n    use: [small, large]\n    handoff: {after_tokens: 2, below: 0.1}\n"
        "    promise: {of: large, keep: 0.9, tolerance: 0.05, shadow: 1.0}\n",
    )
    + "shadow: {share: 0.000001, usd_per_day: 1000}\n"
)
OTHER_WORDS = ("entirely", " different", " here")


async def ask(device: Device, **more: object) -> Answer:
    """Ask, and wait until the shadow request of the answer has ended."""
    answer = await device.ask(f"a question {len(device.cloud.bodies)}", **more)  # type: ignore[arg-type]
    async with asyncio.timeout(20):
        while device.parts.shadows.waiting:  # noqa: ASYNC110 -- a deque has no event
            await asyncio.sleep(0.001)
    return answer


def state(device: Device) -> PromiseSignals:
    return device.parts.signals.snapshot(device.parts.policies.active).promises["edge-first"]


async def told(device: Device, answer: Answer) -> list[str]:
    decision = (await device.record(answer)).decision
    assert decision is not None
    return [reason.code for reason in decision.reasons if reason.code.startswith("promise")]


async def opened(device: Device) -> None:
    device.parts.shadows.rng = random.Random(1)
    for _ in range(400):
        if state(device).threshold is not None:
            return
        answer = await ask(device)
        assert answer.headers["x-causeway-target"] == "large"
    raise AssertionError(state(device))


async def test_labels_open_it_a_fall_closes_it_and_a_restart_goes_on(tmp_path: Path) -> None:
    async with running(tmp_path, policy=PROMISED) as device:
        first = await ask(device)
        assert first.headers["x-causeway-target"] == "large"
        assert await told(device, first) == ["promise_unmeasured"]
        await opened(device)
        assert state(device).answers >= 120
        kept = await ask(device)
        assert (kept.headers["x-causeway-target"], await told(device, kept)) == ("small", ["promise_kept"])
        assert (await device.record(kept)).shadow == "large"
        page = (await device.get("/metrics")).body.decode()
        (threshold,) = metrics(page, "causeway_edge_promise_threshold").values()
        assert 0.0 <= threshold <= 0.9
    async with running(tmp_path, policy=PROMISED) as device:
        async with asyncio.timeout(20):
            while state(device).threshold is None:  # noqa: ASYNC110 -- the file is read in the background
                await asyncio.sleep(0.001)
        device.parts.shadows.rng = random.Random(2)
        assert (await ask(device)).headers["x-causeway-target"] == "small"
        device.cloud.words = OTHER_WORDS
        answers = 0
        while state(device).threshold is not None:
            answers += (await ask(device)).headers["x-causeway-target"] == "small"
            assert answers < 20
        assert (await ask(device)).headers["x-causeway-target"] == "large"
        problems = json.loads((await device.get("/readyz")).body)["problems"]
        assert any("The promise of the route edge-first lacks evidence: the quality fell" in one for one in problems)
        detail = state(device).detail
    async with running(tmp_path, policy=PROMISED) as device:
        async with asyncio.timeout(20):
            while not state(device).detail.startswith("the quality fell"):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert state(device).detail.partition(":")[0] == detail.partition(":")[0]
        assert (await ask(device)).headers["x-causeway-target"] == "large"


async def test_a_private_request_stays_and_says_that_it_is_not_measured(tmp_path: Path) -> None:
    async with running(tmp_path, policy=PROMISED) as device:
        answer = await ask(device, tags="private")
        assert answer.headers["x-causeway-target"] == "small"
        assert await told(device, answer) == ["promise_unmeasured"]
        assert device.cloud.bodies == []
        explained = await device.session.post(
            "/v1/route", json={"model": "auto", "messages": [{"role": "user", "content": "x"}]}
        )
        reasons = (await explained.json())["decision"]["reasons"]
        assert [one["detail"] for one in reasons if one["code"] == "promise_unmeasured"] == [
            "0 of 120 labelled answers"
        ]


async def test_handed_off_answers_are_labelled_and_bad_feedback_counts(tmp_path: Path) -> None:
    """The device's own answer is compared after a handoff; a client's bad score counts against the device."""
    async with running(tmp_path, policy=PROMISED) as device:
        await opened(device)
        labels = state(device).answers
        device.engine.score = 0.05
        for _ in range(12):
            handed_off = await ask(device)
        assert handed_off.headers["x-causeway-reason"] == "handoff: low_confidence"
        assert state(device).answers > labels
        device.engine.score = 0.9
        answer = await ask(device)
        before = sum(device.parts.learned.promises.records[0].bad)
        body = {"id": answer.headers["x-causeway-decision"], "score": 0}
        async with device.session.post("/v1/feedback", json=body) as response:
            assert await response.json() == {"id": body["id"], "counted": True}
        assert sum(device.parts.learned.promises.records[0].bad) > before


async def test_without_the_cloud_the_device_answers_degraded_and_nothing_is_counted(tmp_path: Path) -> None:
    async with running(tmp_path, policy=PROMISED) as device:
        device.cloud.status = 503
        answer = await ask(device)
        assert (answer.status, answer.headers["x-causeway-target"]) == (200, "small")
        assert device.parts.learned.promises.records[0].requests == 0.0
