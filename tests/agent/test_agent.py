"""The agent's way from what runs to what the plan assigns, and back."""

from __future__ import annotations

import pytest

from router.bundle.protocol import BoxState

from .fleet import Publisher, TestBox

pytestmark = pytest.mark.slow

IDLE, TRIAL = BoxState.IDLE, BoxState.TRIAL


async def test_a_box_takes_a_bundle_and_commits_it(publisher: Publisher, box: TestBox) -> None:
    bundle = publisher.release()
    await box.until(TRIAL)
    assert (box.agent.running, box.host.bundle) == (bundle, bundle)
    assert box.host.policy.name == "kiosk-1"
    await box.prove()
    assert box.agent.row.code == ""
    assert not box.agent.row.unproven
    box.start()
    assert (box.agent.running, box.agent.state) == (bundle, IDLE)


async def test_a_third_bundle_lets_the_first_go(publisher: Publisher, box: TestBox) -> None:
    bundles = []
    for _ in range(3):
        bundles.append(publisher.release())
        await box.change()
    assert box.agent.row.bundles == (bundles[2], bundles[1])
    assert {path.name for path in (box.folder / "bundles").iterdir()} == {bundles[1], bundles[2]}


async def test_a_box_that_runs_what_it_should_does_nothing(publisher: Publisher, box: TestBox) -> None:
    publisher.release()
    await box.change()
    rows = box.booted.journal.rows
    await box.until(IDLE)
    assert box.booted.journal.rows == rows
    assert len(box.host.used) == 1
