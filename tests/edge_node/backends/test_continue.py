"""An answer that the cloud truncated, and its rest: the same request again with the continue token."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ..device import Device, running
from ..scripted import CLOUD_WORDS

CLOUD = "".join(CLOUD_WORDS)
CUT = {"x-causeway-tier": "m-large", "x-causeway-tier-reason": "requested; truncated", "x-causeway-degraded": "true"}
TOKEN = "gAAAAAtoken=="


@pytest.fixture
async def device(tmp_path: Path) -> AsyncIterator[Device]:
    async with running(tmp_path) as device:
        device.cloud.resume, device.cloud.headers = TOKEN, CUT
        yield device
        device.assert_nothing_leaks()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_truncated_answer_has_a_continue_token(device: Device, stream: bool) -> None:
    """It is marked degraded, has a token that names the target, and is not cached."""
    for _ in range(2):
        answer = await device.ask(tags="cloud", stream=stream, temperature=0)
        assert (answer.status, answer.text, answer.resume) == (200, CLOUD, f"large~{TOKEN}")
        assert answer.headers["x-causeway-degraded"] == "true"
        assert answer.headers["x-causeway-cache"] == "miss"
    assert len(device.cloud.bodies) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_the_rest_comes_from_the_same_target(device: Device, stream: bool) -> None:
    """Although the policy prefers the device: the continuation goes to the cloud, with its own token, uncached."""
    first = await device.ask(tags="cloud", stream=stream, temperature=0)
    device.cloud.resume, device.cloud.headers = "", {}
    rest = await device.ask(stream=stream, temperature=0, causeway={"continue": first.resume})
    assert (rest.status, rest.text, rest.resume) == (200, CLOUD, "")
    assert (rest.headers["x-causeway-target"], rest.headers["x-causeway-reason"]) == ("large", "continued")
    assert rest.headers["x-causeway-cache"] == "bypass"
    sent, again = device.cloud.bodies
    assert "causeway" not in sent
    assert again == {**sent, "causeway": {"continue": TOKEN}}
    assert device.cloud.request_headers[-1]["cache-control"] == "no-store"


async def test_no_other_target_can_continue(device: Device) -> None:
    """With the cloud unreachable: an error, not an answer of the device that starts over."""
    first = await device.ask(tags="cloud")
    device.cloud.fault = "refuse"
    rest = await device.ask(causeway={"continue": first.resume})
    assert (rest.status, rest.code) == (502, "all_attempts_failed")
    assert "small" not in rest.message


async def test_a_continue_token_does_not_override_a_constraint(device: Device) -> None:
    rest = await device.ask(tags="private", causeway={"continue": f"large~{TOKEN}"})
    assert (rest.status, rest.code) == (503, "no_route")
    assert device.cloud.bodies == []


@pytest.mark.parametrize("token", [TOKEN, f"small~{TOKEN}", f"gone~{TOKEN}"])
async def test_a_token_of_no_cloud_target_is_a_400(device: Device, token: str) -> None:
    """Without a target, of an edge target, or of one that the policy no longer has: 400, and no call."""
    rest = await device.ask(causeway={"continue": token})
    assert (rest.status, rest.code) == (400, "invalid_value")
    assert device.cloud.bodies == []


async def test_a_token_that_the_cloud_rejects_is_a_400(device: Device) -> None:
    """With the cloud's message."""
    device.cloud.status, device.cloud.error = 400, {"message": "has expired", "param": "causeway.continue"}
    rest = await device.ask(causeway={"continue": f"large~{TOKEN}"})
    assert (rest.status, rest.message) == (400, "has expired")
