"""A device replays its own decisions of the last day before it changes: requests that would leave it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from causeway_server.edge_node.clock import Clock
from causeway_server.edge_node.storage.decisions import DecisionStore
from causeway_server.router.bundle.protocol import DeviceState
from causeway_server.router.policy.compiled import parse_policy
from tests.router.checks.recorded import ask, record_of

from .fleet import Publisher, TestDevice

pytestmark = pytest.mark.slow

KEEPS = """\
version: 1
name: keeps
targets:
  small: {at: edge, model: m-small}
  large: {at: cloud, model: m-large}
constraints:
  - {name: private-stays, keep: on_device, when: '"private" in request.tags'}
routes:
  - {name: device, use: [small]}
"""
SENDS = KEEPS.replace("use: [small]", "use: [large, small]").replace("keeps", "sends")
PUBLIC = SENDS.replace('"private" in', '"secret" in').replace("sends", "public")
CASES = """\
policy: ../kiosk.yaml
cases:
  - {name: the device answers, expect: {route: device}}
"""
REPORT = "    leaving: report\n"


@pytest.fixture
def device(tmp_path: Path, publisher: Publisher) -> TestDevice:
    (publisher.path / "policies" / "cases" / "kiosk.yaml").write_text(CASES)
    return TestDevice(tmp_path / "state", publisher)


def decided(device: TestDevice, *tags: tuple[str, ...], running: str = KEEPS) -> None:
    """Let the device have decided requests with these tags under its policy."""
    policy = parse_policy(running)
    factory = device.state / "factory.yaml"
    factory.write_text(running)
    device.host.policy_file = factory
    store = DecisionStore(
        memory_records=10, max_age_s=1e9, directory=device.state, clock=Clock(lambda: 0.0, lambda: device.time.unix)
    )
    store.start()
    for number, tag in enumerate(tags):
        record = record_of(policy, ask(tags=tag), number=number)
        store.add(msgspec.structs.replace(record, created=device.time.unix - 60.0))
    store.close()


async def test_requests_that_would_leave_are_refused_by_name(publisher: Publisher, device: TestDevice) -> None:
    decided(device, (), ("private",), ())
    bundle = publisher.release(policy=SENDS)
    await device.until(DeviceState.IDLE)
    assert (device.agent.running, device.agent.row.code, device.host.used) == (None, "requests_leave", [])
    reason = device.agent.row.quarantined[bundle]
    assert reason.startswith("requests_leave: 2 of the last 3 decisions would or might leave the device, such as ")
    assert "(small (edge) -> large (cloud), rule device)" in reason


async def test_a_private_request_that_a_constraint_no_longer_keeps_is_refused(
    publisher: Publisher, device: TestDevice
) -> None:
    decided(device, ("private",), running=SENDS)
    bundle = publisher.release(policy=PUBLIC)
    await device.until(DeviceState.IDLE)
    assert "1 of the last 1 decisions" in device.agent.row.quarantined[bundle]


async def test_a_cohort_may_let_its_devices_report_them_alone(publisher: Publisher, device: TestDevice) -> None:
    decided(device, (), ("private",))
    bundle = publisher.release(policy=SENDS, extra=REPORT)
    await device.until(DeviceState.TRIAL)
    assert (device.agent.running, device.agent.row.code) == (bundle, "requests_leave")
    assert device.agent.row.reason == "1 of the last 2 decisions would or might leave the device"
    await device.prove()
    assert (device.agent.running, device.agent.row.code) == (bundle, "")


@pytest.mark.parametrize("policy", [KEEPS.replace("keeps", "again"), None], ids=["same routes", "device alone"])
async def test_a_policy_that_keeps_them_is_taken(publisher: Publisher, device: TestDevice, policy: str | None) -> None:
    decided(device, (), ("private",))
    bundle = publisher.release(policy=policy or "")
    await device.change()
    assert (device.agent.running, device.agent.row.code) == (bundle, "")


async def test_the_way_back_is_never_barred(publisher: Publisher, device: TestDevice) -> None:
    """A rollout that is aborted returns the device to what it ran before, also where that sent more to the cloud."""
    first = publisher.release(policy=SENDS, extra=REPORT)
    await device.change()
    publisher.assign(first)
    strict = publisher.release(policy=SENDS)
    await device.change()
    second = publisher.release(policy=KEEPS)
    await device.change()
    decided(device, (), ())
    publisher.assign(second, from_bundle=strict, share=0)
    await device.until(DeviceState.TRIAL)
    assert (device.agent.running, device.agent.row.code) == (strict, "requests_leave")


async def test_a_running_policy_that_cannot_be_read_is_no_excuse(publisher: Publisher, device: TestDevice) -> None:
    """Compared with what was recorded instead."""
    decided(device, ())
    device.host.policy_file.write_text("version: 9\n")
    publisher.release(policy=SENDS)
    await device.until(DeviceState.IDLE)
    assert device.agent.row.code == "requests_leave"
