"""Every fault of every target, complete and streamed: one answer or one error, and nothing is left running."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.waiting import until

from ..device import Answer, Device, hasty, running
from ..scripted import CLOUD_WORDS, EDGE_WORDS, FAULTS, Fault

pytestmark = pytest.mark.slow

EDGE, CLOUD = "".join(EDGE_WORDS), "".join(CLOUD_WORDS)
# After these the client of a stream has bytes already: there is no way back.
LATE: tuple[Fault, ...] = ("die", "unfinished")


@pytest.fixture
async def device(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Device]:
    """A daemon with short timeouts of the targets whose fault ends by a timeout alone; the others may take long."""
    callspec = getattr(request.node, "callspec", None)
    given = dict(callspec.params) if callspec else {}
    faults = {"small": given.get("edge_fault", ""), "large": given.get("cloud_fault", "")}
    faults["large" if given.get("first") == "cloud" else "small"] += given.get("fault", "")
    async with running(
        tmp_path, policy=hasty(*(name for name in faults if faults[name] in ("stall", "drip")))
    ) as device:
        yield device


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("first", ["edge", "cloud"])
async def test_a_fault_of_the_first_target_is_answered_by_the_second(
    device: Device, first: str, fault: Fault, stream: bool
) -> None:
    """Before the first byte the other target answers, degraded; after it the stream ends with an error event."""
    (device.engine if first == "edge" else device.cloud).fault = fault
    answer = await device.ask(stream=stream, tags=first if first == "cloud" else "")
    record = await device.record(answer)
    if fault == "drip" and first == "edge":
        # Slow is not broken: nothing bounds it but the request's deadline, and that is far.
        assert answer.text == EDGE
    elif stream and (fault in LATE or (fault == "drip" and first == "cloud")):
        assert_cut(answer, EDGE if first == "edge" else CLOUD)
        assert record.outcome.status == "error"
        assert len(record.outcome.attempts) == 1, "no switch after the first byte"
    else:
        assert answer.status == 200
        assert answer.text == (CLOUD if first == "edge" else EDGE)
        assert answer.headers["x-causeway-degraded"] == "true"
        assert [attempt.target for attempt in record.outcome.attempts] == (
            ["small", "large"] if first == "edge" else ["large", "small"]
        )
        assert record.outcome.attempts[0].error
        assert record.outcome.degraded
    await assert_settled(device, answer)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("edge_fault", ["refuse", "stall", "corrupt"])
@pytest.mark.parametrize("cloud_fault", ["refuse", "stall", "corrupt"])
async def test_when_every_target_fails_the_error_names_every_reason(
    device: Device, edge_fault: Fault, cloud_fault: Fault, stream: bool
) -> None:
    """A 503 with each target's reason, without a failed component's message; 502 where both were reached and broke."""
    expected = 502 if edge_fault == "corrupt" and cloud_fault != "stall" else 503
    device.engine.fault, device.cloud.fault = edge_fault, cloud_fault
    answer = await device.ask(stream=stream)
    assert answer.status == expected
    assert answer.code == "all_attempts_failed"
    assert "small" in answer.message
    assert "large" in answer.message
    assert "secret" not in answer.message
    record = await device.record(answer)
    assert record.outcome.http_status == expected
    assert len(record.outcome.attempts) == 2
    await assert_settled(device, answer)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("fault", ["none", *FAULTS])
async def test_a_request_bound_to_the_device_never_reaches_the_cloud(
    device: Device, fault: Fault, stream: bool
) -> None:
    device.engine.fault = fault
    answer = await device.ask("my secret", stream=stream, tags="private", temperature=0)
    assert device.cloud.bodies == []
    record = await device.record(answer)
    assert all(attempt.at == "edge" for attempt in record.outcome.attempts)
    assert record.decision is not None
    assert record.decision.private
    await assert_settled(device, answer)


@pytest.mark.parametrize("fault", ["none", *FAULTS])
@pytest.mark.parametrize("first", ["edge", "cloud"])
async def test_a_disconnected_client_is_one_cancelled_outcome(device: Device, first: str, fault: Fault) -> None:
    (device.engine if first == "edge" else device.cloud).fault = fault
    part = device.engine if first == "edge" else device.cloud
    body = {"model": "auto", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with device.session.post(
        "/v1/chat/completions", json=body, headers={"x-causeway-tags": first, "Connection": "close"}
    ) as response:
        await part.entered.wait()
        response.close()
    await until(lambda: len(device.parts.decisions.memory))
    await until(lambda: device.engine.running == 0 and device.cloud.running == 0)
    assert len(device.parts.decisions.memory) == 1
    device.assert_nothing_leaks()


async def test_a_handoff_shows_only_the_second_targets_answer(device: Device) -> None:
    """The record has both attempts and the confidence."""
    device.engine.score = 0.1
    answer = await device.ask(stream=True, tags="handoff")
    assert answer.text == CLOUD
    assert answer.headers["x-causeway-degraded"] == "false", "low confidence is no failure"
    assert answer.headers["x-causeway-reason"] == "handoff: low_confidence"
    record = await device.record(answer)
    assert [attempt.state for attempt in record.outcome.attempts] == ["handed_off", "done"]
    confidence = record.outcome.attempts[0].confidence
    assert confidence is not None
    assert confidence.score == 0.1
    await assert_settled(device, answer)


async def test_first_tokens_of_high_confidence_are_released(device: Device) -> None:
    answer = await device.ask(stream=True, tags="handoff")
    assert answer.text == EDGE
    assert device.cloud.bodies == []
    await assert_settled(device, answer)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("cloud_fault", ["refuse", "stall", "corrupt"])
async def test_a_handoff_to_a_failing_cloud_is_answered_by_the_device(
    device: Device, cloud_fault: Fault, stream: bool
) -> None:
    """An answer of low confidence is better than none; it is marked degraded."""
    device.engine.score = 0.1
    device.cloud.fault = cloud_fault
    answer = await device.ask(stream=stream, tags="handoff")
    assert answer.text == EDGE
    assert answer.headers["x-causeway-degraded"] == "true"
    record = await device.record(answer)
    assert [attempt.target for attempt in record.outcome.attempts] == ["small", "large", "small"]
    await assert_settled(device, answer)


@pytest.mark.parametrize("fault", ["stall", "drip"])
async def test_a_deadline_ends_the_work_everywhere(device: Device, fault: Fault) -> None:
    """A 504, and no other target is tried."""
    device.cloud.fault = fault
    answer = await device.ask(tags="cloud", headers={"x-causeway-deadline-ms": "1000"})
    assert answer.status == 504
    assert answer.code == "deadline_exceeded"
    assert device.engine.calls == []
    assert 0 < int(device.cloud.request_headers[0]["x-causeway-deadline-ms"]) <= 1000
    await assert_settled(device, answer)


def assert_cut(answer: Answer, words: str) -> None:
    """A stream that broke: a beginning of one answer, then an error event, and nothing that says it ended well."""
    assert answer.status == 200
    assert words.startswith(answer.text)
    assert not answer.done
    assert "stop" not in answer.finish_reasons
    assert "error" in answer.events[-1]


async def assert_settled(device: Device, answer: Answer) -> None:
    """One outcome for this request, no permit held, nothing running."""
    assert len(device.parts.decisions.memory) == 1
    assert device.newest().id == answer.headers["x-causeway-decision"]
    await until(lambda: device.engine.running == 0 and device.cloud.running == 0)
    device.assert_nothing_leaks()
