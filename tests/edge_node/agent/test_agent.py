"""The agent's way from the running bundle to the assigned one, and back."""

from __future__ import annotations

import msgspec
import pytest

from causeway_server.edge_node.agent.journal import TRANSITIONS, Event
from causeway_server.router.bundle.protocol import BoxState
from tests.models.llama_cpp.tiny_gguf import write_tiny_gguf

from .fleet import POLICY, Publisher, TestBox

pytestmark = pytest.mark.slow

IDLE, TRIAL = BoxState.IDLE, BoxState.TRIAL
MODEL = """\
    models:
      m-small: {file: model.gguf, golden: [{prompt: "2+2?", answer: "4"}]}
"""


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


async def test_a_failed_trial_is_undone_and_not_tried_again(publisher: Publisher, box: TestBox) -> None:
    first = publisher.release()
    await box.change()
    second = publisher.release()
    await box.until(TRIAL)
    await box.agent.advance()
    box.host.serve(200, errors=10)
    await box.until(IDLE)
    assert box.host.bundle == first
    assert (box.agent.running, box.agent.row.code) == (first, "errors_rose")
    assert list(box.agent.row.quarantined) == [second]
    await box.until(IDLE)
    assert (box.agent.running, box.agent.wanted, box.agent.row.code) == (first, second, "errors_rose")
    third = publisher.release()
    await box.until(TRIAL)
    before = box.agent.row.before
    assert before is not None
    assert (before.traffic.requests, before.traffic.errors) == (300, 0)  # not those of the second bundle
    await box.prove()
    assert (box.agent.running, box.agent.row.code) == (third, "")


@pytest.mark.parametrize(
    ("looks", "trial_c", "code"),
    [(24, 85.0, ""), (24, 91.0, "heat_rose"), (8, 91.0, "")],
    ids=["as warm as by day", "warmer than by day", "the day is unknown"],
)
async def test_a_box_that_changes_at_night_may_get_as_warm_as_by_day(
    publisher: Publisher, box: TestBox, looks: int, trial_c: float, code: str
) -> None:
    """80 °C by day, 50 °C when it changes: the traffic of the morning is not the bundle's fault."""
    publisher.release()
    await box.change()
    for look in range(looks + 1):
        temperature_c = 80.0 if look < looks / 2 else 50.0
        box.host.now = msgspec.structs.replace(box.host.now, temperature_c=temperature_c)
        await box.until(IDLE)
        box.time.pass_s(3600.0)
    publisher.release()
    await box.until(TRIAL)
    await box.agent.advance()
    box.host.now = msgspec.structs.replace(box.host.now, temperature_c=trial_c)
    box.host.serve(300)
    for _ in range(13):
        await box.agent.advance()
        box.time.pass_s(60.0)
    await box.until(IDLE)
    assert box.agent.row.code == code


async def test_an_idle_box_commits_unproven(publisher: Publisher, box: TestBox) -> None:
    bundle = publisher.release()
    await box.until(TRIAL)
    await box.agent.advance()
    box.time.pass_s(700.0)
    await box.agent.advance()
    assert box.agent.state is TRIAL
    box.time.pass_s(86400.0)
    await box.until(IDLE)
    assert (box.agent.running, box.agent.row.unproven) == (bundle, True)


async def test_a_withdrawn_bundle_is_undone_without_quarantine(publisher: Publisher, box: TestBox) -> None:
    first = publisher.release()
    await box.change()
    second = publisher.release()
    await box.until(TRIAL)
    publisher.assign(second, from_bundle=first, share=0)
    box.time.pass_s(1000.0)
    await box.until(IDLE)
    assert (box.agent.running, box.agent.row.quarantined) == (first, {})


async def test_a_box_waits_for_permission_and_then_for_another_bundle(publisher: Publisher, box: TestBox) -> None:
    box.may_change = no_permission
    box.start()
    bundle = publisher.release()
    await box.until(BoxState.STAGE)
    assert await box.agent.advance() == 60.0
    assert (box.agent.state, box.agent.running) == (BoxState.STAGE, None)
    publisher.release()
    box.time.pass_s(1000.0)
    await box.until(IDLE)
    assert box.agent.wanted not in (None, bundle)


async def no_permission(_: str) -> float:
    return 60.0


async def test_settings_are_taken_by_a_restart_that_does_not_count(publisher: Publisher, box: TestBox) -> None:
    publisher.release()
    await box.change()
    bundle = publisher.release(extra="    settings: {engine.threads: 2}\n")
    await box.until(BoxState.ACTIVATE)
    await box.agent.advance()
    assert box.host.restarts == 1
    box.start()
    assert (box.agent.state, box.agent.running, box.agent.row.boots) == (TRIAL, bundle, 0)
    await box.prove()
    assert box.agent.running == bundle


@pytest.mark.parametrize("has_bundle", [True, False])
async def test_a_trial_that_ends_the_daemon_again_and_again_is_undone(
    publisher: Publisher, box: TestBox, has_bundle: bool
) -> None:
    first = publisher.release() if has_bundle else None
    if has_bundle:
        await box.change()
    second = publisher.release()
    await box.until(TRIAL)
    for _ in range(3):
        box.start()
        assert (box.agent.state, box.agent.running) == (TRIAL, second)
    box.start()
    assert (box.agent.state, box.agent.running, box.host.bundle) == (IDLE, first, first)
    assert box.agent.row.quarantined[second].startswith("boots_failed")
    box.start()
    assert (box.agent.state, box.agent.running) == (IDLE, first)


@pytest.mark.parametrize("damaged", ["policy", "manifest", "both", "pointer", "journal"])
async def test_a_damaged_box_starts_with_what_is_whole(publisher: Publisher, box: TestBox, damaged: str) -> None:
    first = publisher.release()
    await box.change()
    second = publisher.release()
    await box.change()
    policies = {bundle: box.booted.store.load(bundle).policy for bundle in (first, second)}
    if damaged in ("policy", "both"):
        policies[second].write_bytes(policies[second].read_bytes()[:-1] + b"#")
    if damaged == "both":
        policies[first].unlink()
    if damaged == "manifest":
        (box.folder / "bundles" / second / "manifest.json").write_bytes(b"")
    if damaged == "pointer":
        (box.folder / "active.json").write_bytes(b"\0" * 20)
    if damaged == "journal":
        (box.folder / "journal.jsonl").write_bytes(b"\0" * 2000)
    box.start()
    expected = {"policy": first, "manifest": first, "both": None}.get(damaged, second)
    assert (box.agent.state, box.agent.running, box.host.bundle) == (IDLE, expected, expected)
    if expected is not second:
        assert box.agent.row.code == "bundle_altered"
        await box.change()
    assert box.agent.running == second


async def test_a_policy_whose_cases_fail_here_is_quarantined(publisher: Publisher, box: TestBox) -> None:
    bundle = publisher.release(policy=POLICY.format(number=7, model="m-small").replace("name: device", "name: other"))
    await box.until(IDLE)
    assert (box.agent.running, box.agent.row.code, list(box.agent.row.quarantined)) == (None, "cases_failed", [bundle])
    assert box.host.used == []


async def test_a_model_that_answers_nonsense_is_undone(publisher: Publisher, box: TestBox) -> None:
    write_tiny_gguf(publisher.path / "model.gguf")
    publisher.release(extra=MODEL)
    box.host.nonsense = True
    await box.until(IDLE, steps=12)
    assert (box.agent.running, box.agent.row.code) == (None, "golden_answer_differs")


async def test_a_model_that_is_too_large_for_this_box_is_quarantined(publisher: Publisher, box: TestBox) -> None:
    write_tiny_gguf(publisher.path / "model.gguf")
    box.host.memory_bytes = 4 << 20
    bundle = publisher.release(extra=MODEL)
    await box.until(IDLE)
    assert (box.agent.row.code, list(box.agent.row.quarantined)) == ("model_too_large", [bundle])


async def test_a_bundle_for_a_newer_daemon_waits_for_it(publisher: Publisher, box: TestBox) -> None:
    bundle = publisher.release(extra="    min_daemon: 9.0.0\n")
    await box.until(IDLE)
    assert (box.agent.row.code, box.agent.row.quarantined) == ("daemon_too_old", {})
    box.host.daemon_version = "9.0.1"
    box.start()
    await box.change()
    assert box.agent.running == bundle


@pytest.mark.parametrize("state", [state for state, events in TRANSITIONS.items() if Event.RESTARTED in events])
async def test_a_start_follows_the_table(publisher: Publisher, box: TestBox, state: BoxState) -> None:
    first = publisher.release()
    await box.change()
    second = publisher.release()
    await box.until(TRIAL)
    moved = state in (BoxState.ACTIVATE, TRIAL, BoxState.COMMIT, BoxState.ROLLBACK)
    bundles = (second, first) if moved else (first,)
    row = msgspec.structs.replace(box.agent.row, state=state, bundle=second, bundles=bundles, code="errors_rose")
    box.booted.journal.append(row)
    box.booted.store.point(bundles)
    box.start()
    assert box.agent.state is TRANSITIONS[state][Event.RESTARTED]
    assert box.agent.running == (second if moved and state is not BoxState.ROLLBACK else first)
