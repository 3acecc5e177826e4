"""The agent's way from the running bundle to the assigned one, and back."""

from __future__ import annotations

import msgspec
import pytest

from causeway_server.edge_node.agent.journal import TRANSITIONS, Event
from causeway_server.router.bundle.protocol import DeviceState
from tests.models.llama_cpp.tiny_gguf import write_tiny_gguf

from .fleet import POLICY, Publisher, TestDevice

pytestmark = pytest.mark.slow

IDLE, TRIAL = DeviceState.IDLE, DeviceState.TRIAL
MODEL = """\
    models:
      m-small: {file: model.gguf, golden: [{prompt: "2+2?", answer: "4"}]}
"""


async def test_a_device_takes_a_bundle_and_commits_it(publisher: Publisher, device: TestDevice) -> None:
    bundle = publisher.release()
    await device.until(TRIAL)
    assert (device.agent.running, device.host.bundle) == (bundle, bundle)
    assert device.host.policy.name == "kiosk-1"
    await device.prove()
    assert device.agent.row.code == ""
    assert not device.agent.row.unproven
    device.start()
    assert (device.agent.running, device.agent.state) == (bundle, IDLE)


async def test_a_third_bundle_lets_the_first_go(publisher: Publisher, device: TestDevice) -> None:
    bundles = []
    for _ in range(3):
        bundles.append(publisher.release())
        await device.change()
    assert device.agent.row.bundles == (bundles[2], bundles[1])
    assert {path.name for path in (device.folder / "bundles").iterdir()} == {bundles[1], bundles[2]}


async def test_a_device_that_runs_what_it_should_does_nothing(publisher: Publisher, device: TestDevice) -> None:
    publisher.release()
    await device.change()
    rows = device.booted.journal.rows
    await device.until(IDLE)
    assert device.booted.journal.rows == rows
    assert len(device.host.used) == 1


async def test_a_failed_trial_is_undone_and_not_tried_again(publisher: Publisher, device: TestDevice) -> None:
    first = publisher.release()
    await device.change()
    second = publisher.release()
    await device.until(TRIAL)
    await device.agent.advance()
    device.host.serve(200, errors=10)
    await device.until(IDLE)
    assert device.host.bundle == first
    assert (device.agent.running, device.agent.row.code) == (first, "errors_rose")
    assert list(device.agent.row.quarantined) == [second]
    await device.until(IDLE)
    assert (device.agent.running, device.agent.wanted, device.agent.row.code) == (first, second, "errors_rose")
    third = publisher.release()
    await device.until(TRIAL)
    before = device.agent.row.before
    assert before is not None
    assert (before.traffic.requests, before.traffic.errors) == (300, 0)  # not those of the second bundle
    await device.prove()
    assert (device.agent.running, device.agent.row.code) == (third, "")


@pytest.mark.parametrize(
    ("looks", "trial_c", "code"),
    [(24, 85.0, ""), (24, 91.0, "heat_rose"), (8, 91.0, "")],
    ids=["as warm as by day", "warmer than by day", "the day is unknown"],
)
async def test_a_device_that_changes_at_night_may_get_as_warm_as_by_day(
    publisher: Publisher, device: TestDevice, looks: int, trial_c: float, code: str
) -> None:
    """80 °C by day, 50 °C when it changes: the traffic of the morning is not the bundle's fault."""
    publisher.release()
    await device.change()
    for look in range(looks + 1):
        temperature_c = 80.0 if look < looks / 2 else 50.0
        device.host.now = msgspec.structs.replace(device.host.now, temperature_c=temperature_c)
        await device.until(IDLE)
        device.time.pass_s(3600.0)
    publisher.release()
    await device.until(TRIAL)
    await device.agent.advance()
    device.host.now = msgspec.structs.replace(device.host.now, temperature_c=trial_c)
    device.host.serve(300)
    for _ in range(13):
        await device.agent.advance()
        device.time.pass_s(60.0)
    await device.until(IDLE)
    assert device.agent.row.code == code


async def test_an_idle_device_commits_unproven(publisher: Publisher, device: TestDevice) -> None:
    bundle = publisher.release()
    await device.until(TRIAL)
    await device.agent.advance()
    device.time.pass_s(700.0)
    await device.agent.advance()
    assert device.agent.state is TRIAL
    device.time.pass_s(86400.0)
    await device.until(IDLE)
    assert (device.agent.running, device.agent.row.unproven) == (bundle, True)


async def test_a_withdrawn_bundle_is_undone_without_quarantine(publisher: Publisher, device: TestDevice) -> None:
    first = publisher.release()
    await device.change()
    second = publisher.release()
    await device.until(TRIAL)
    publisher.assign(second, from_bundle=first, share=0)
    device.time.pass_s(1000.0)
    await device.until(IDLE)
    assert (device.agent.running, device.agent.row.quarantined) == (first, {})


async def test_a_device_waits_for_permission_and_then_for_another_bundle(
    publisher: Publisher, device: TestDevice
) -> None:
    device.may_change = no_permission
    device.start()
    bundle = publisher.release()
    await device.until(DeviceState.STAGE)
    assert await device.agent.advance() == 60.0
    assert (device.agent.state, device.agent.running) == (DeviceState.STAGE, None)
    publisher.release()
    device.time.pass_s(1000.0)
    await device.until(IDLE)
    assert device.agent.wanted not in (None, bundle)


async def no_permission(_: str) -> float:
    return 60.0


async def test_settings_are_taken_by_a_restart_that_does_not_count(publisher: Publisher, device: TestDevice) -> None:
    publisher.release()
    await device.change()
    bundle = publisher.release(extra="    settings: {engine.threads: 2}\n")
    await device.until(DeviceState.ACTIVATE)
    await device.agent.advance()
    assert device.host.restarts == 1
    device.start()
    assert (device.agent.state, device.agent.running, device.agent.row.boots) == (TRIAL, bundle, 0)
    await device.prove()
    assert device.agent.running == bundle


@pytest.mark.parametrize("has_bundle", [True, False])
async def test_a_trial_that_ends_the_daemon_again_and_again_is_undone(
    publisher: Publisher, device: TestDevice, has_bundle: bool
) -> None:
    first = publisher.release() if has_bundle else None
    if has_bundle:
        await device.change()
    second = publisher.release()
    await device.until(TRIAL)
    for _ in range(3):
        device.start()
        assert (device.agent.state, device.agent.running) == (TRIAL, second)
    device.start()
    assert (device.agent.state, device.agent.running, device.host.bundle) == (IDLE, first, first)
    assert device.agent.row.quarantined[second].startswith("boots_failed")
    device.start()
    assert (device.agent.state, device.agent.running) == (IDLE, first)


@pytest.mark.parametrize("damaged", ["policy", "manifest", "both", "pointer", "journal"])
async def test_a_damaged_device_starts_with_what_is_whole(
    publisher: Publisher, device: TestDevice, damaged: str
) -> None:
    first = publisher.release()
    await device.change()
    second = publisher.release()
    await device.change()
    policies = {bundle: device.booted.store.load(bundle).policy for bundle in (first, second)}
    if damaged in ("policy", "both"):
        policies[second].write_bytes(policies[second].read_bytes()[:-1] + b"#")
    if damaged == "both":
        policies[first].unlink()
    if damaged == "manifest":
        (device.folder / "bundles" / second / "manifest.json").write_bytes(b"")
    if damaged == "pointer":
        (device.folder / "active.json").write_bytes(b"\0" * 20)
    if damaged == "journal":
        (device.folder / "journal.jsonl").write_bytes(b"\0" * 2000)
    device.start()
    expected = {"policy": first, "manifest": first, "both": None}.get(damaged, second)
    assert (device.agent.state, device.agent.running, device.host.bundle) == (IDLE, expected, expected)
    if expected is not second:
        assert device.agent.row.code == "bundle_altered"
        await device.change()
    assert device.agent.running == second


async def test_a_policy_whose_cases_fail_here_is_quarantined(publisher: Publisher, device: TestDevice) -> None:
    bundle = publisher.release(policy=POLICY.format(number=7, model="m-small").replace("name: device", "name: other"))
    await device.until(IDLE)
    assert (device.agent.running, device.agent.row.code, list(device.agent.row.quarantined)) == (
        None,
        "cases_failed",
        [bundle],
    )
    assert device.host.used == []


async def test_a_model_that_answers_nonsense_is_undone(publisher: Publisher, device: TestDevice) -> None:
    write_tiny_gguf(publisher.path / "model.gguf")
    publisher.release(extra=MODEL)
    device.host.nonsense = True
    await device.until(IDLE, steps=12)
    assert (device.agent.running, device.agent.row.code) == (None, "golden_answer_differs")


async def test_a_model_that_is_too_large_for_this_device_is_quarantined(
    publisher: Publisher, device: TestDevice
) -> None:
    write_tiny_gguf(publisher.path / "model.gguf")
    device.host.memory_bytes = 4 << 20
    bundle = publisher.release(extra=MODEL)
    await device.until(IDLE)
    assert (device.agent.row.code, list(device.agent.row.quarantined)) == ("model_too_large", [bundle])


async def test_a_bundle_for_a_newer_daemon_waits_for_it(publisher: Publisher, device: TestDevice) -> None:
    bundle = publisher.release(extra="    min_daemon: 9.0.0\n")
    await device.until(IDLE)
    assert (device.agent.row.code, device.agent.row.quarantined) == ("daemon_too_old", {})
    device.host.daemon_version = "9.0.1"
    device.start()
    await device.change()
    assert device.agent.running == bundle


@pytest.mark.parametrize("state", [state for state, events in TRANSITIONS.items() if Event.RESTARTED in events])
async def test_a_start_follows_the_table(publisher: Publisher, device: TestDevice, state: DeviceState) -> None:
    first = publisher.release()
    await device.change()
    second = publisher.release()
    await device.until(TRIAL)
    moved = state in (DeviceState.ACTIVATE, TRIAL, DeviceState.COMMIT, DeviceState.ROLLBACK)
    bundles = (second, first) if moved else (first,)
    row = msgspec.structs.replace(device.agent.row, state=state, bundle=second, bundles=bundles, code="errors_rose")
    device.booted.journal.append(row)
    device.booted.store.point(bundles)
    device.start()
    assert device.agent.state is TRANSITIONS[state][Event.RESTARTED]
    assert device.agent.running == (second if moved and state is not DeviceState.ROLLBACK else first)
