"""A box replays its own decisions of the last day before it changes: requests that would leave it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from causeway_server.edge_node.clock import Clock
from causeway_server.edge_node.storage.decisions import DecisionStore
from causeway_server.router.bundle.protocol import BoxState
from causeway_server.router.policy.compiled import parse_policy
from tests.router.checks.recorded import ask, record_of

from .fleet import Publisher, TestBox

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
def box(tmp_path: Path, publisher: Publisher) -> TestBox:
    (publisher.path / "policies" / "cases" / "kiosk.yaml").write_text(CASES)
    return TestBox(tmp_path / "state", publisher)


def decided(box: TestBox, *tags: tuple[str, ...], running: str = KEEPS) -> None:
    """Let the box have decided requests with these tags under its policy."""
    policy = parse_policy(running)
    factory = box.state / "factory.yaml"
    factory.write_text(running)
    box.host.policy_file = factory
    store = DecisionStore(
        memory_records=10, max_age_s=1e9, directory=box.state, clock=Clock(lambda: 0.0, lambda: box.time.unix)
    )
    store.start()
    for number, tag in enumerate(tags):
        record = record_of(policy, ask(tags=tag), number=number)
        store.add(msgspec.structs.replace(record, created=box.time.unix - 60.0))
    store.close()


async def test_requests_that_would_leave_are_refused_by_name(publisher: Publisher, box: TestBox) -> None:
    decided(box, (), ("private",), ())
    bundle = publisher.release(policy=SENDS)
    await box.until(BoxState.IDLE)
    assert (box.agent.running, box.agent.row.code, box.host.used) == (None, "requests_leave", [])
    reason = box.agent.row.quarantined[bundle]
    assert reason.startswith("requests_leave: 2 of the last 3 decisions would or may leave the device, such as ")
    assert "(small (edge) -> large (cloud), rule device)" in reason


async def test_a_private_request_that_a_constraint_no_longer_keeps_is_refused(
    publisher: Publisher, box: TestBox
) -> None:
    decided(box, ("private",), running=SENDS)
    bundle = publisher.release(policy=PUBLIC)
    await box.until(BoxState.IDLE)
    assert "1 of the last 1 decisions" in box.agent.row.quarantined[bundle]


async def test_a_cohort_may_let_its_boxes_report_them_alone(publisher: Publisher, box: TestBox) -> None:
    decided(box, (), ("private",))
    bundle = publisher.release(policy=SENDS, extra=REPORT)
    await box.until(BoxState.TRIAL)
    assert (box.agent.running, box.agent.row.code) == (bundle, "requests_leave")
    assert box.agent.row.reason == "1 of the last 2 decisions would or may leave the device"
    await box.prove()
    assert (box.agent.running, box.agent.row.code) == (bundle, "")


@pytest.mark.parametrize("policy", [KEEPS.replace("keeps", "again"), None], ids=["same routes", "device alone"])
async def test_a_policy_that_keeps_them_is_taken(publisher: Publisher, box: TestBox, policy: str | None) -> None:
    decided(box, (), ("private",))
    bundle = publisher.release(policy=policy or "")
    await box.change()
    assert (box.agent.running, box.agent.row.code) == (bundle, "")


async def test_the_way_back_is_never_barred(publisher: Publisher, box: TestBox) -> None:
    """A rollout that is aborted returns the box to what it ran before, also where that sent more to the cloud."""
    first = publisher.release(policy=SENDS, extra=REPORT)
    await box.change()
    publisher.assign(first)
    strict = publisher.release(policy=SENDS)
    await box.change()
    second = publisher.release(policy=KEEPS)
    await box.change()
    decided(box, (), ())
    publisher.assign(second, from_bundle=strict, share=0)
    await box.until(BoxState.TRIAL)
    assert (box.agent.running, box.agent.row.code) == (strict, "requests_leave")


async def test_a_running_policy_that_cannot_be_read_is_no_excuse(publisher: Publisher, box: TestBox) -> None:
    """Compared with what was recorded instead."""
    decided(box, ())
    box.host.policy_file.write_text("version: 9\n")
    publisher.release(policy=SENDS)
    await box.until(BoxState.IDLE)
    assert box.agent.row.code == "requests_leave"
