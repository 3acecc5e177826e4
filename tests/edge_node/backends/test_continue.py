"""An answer that the cloud truncated, and its rest: the same request again with the continue token."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ..box import Box, running
from ..scripted import CLOUD_WORDS

CLOUD = "".join(CLOUD_WORDS)
CUT = {"x-causeway-tier": "m-large", "x-causeway-tier-reason": "requested; truncated", "x-causeway-degraded": "true"}
TOKEN = "gAAAAAtoken=="


@pytest.fixture
async def box(tmp_path: Path) -> AsyncIterator[Box]:
    async with running(tmp_path) as box:
        box.cloud.resume, box.cloud.headers = TOKEN, CUT
        yield box
        box.assert_nothing_leaks()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_truncated_answer_has_a_continue_token(box: Box, stream: bool) -> None:
    """It is marked degraded, has a token that names the target, and is not cached."""
    for _ in range(2):
        answer = await box.ask(tags="cloud", stream=stream, temperature=0)
        assert (answer.status, answer.text, answer.resume) == (200, CLOUD, f"large~{TOKEN}")
        assert answer.headers["x-causeway-degraded"] == "true"
        assert answer.headers["x-causeway-cache"] == "miss"
    assert len(box.cloud.bodies) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_the_rest_comes_from_the_same_target(box: Box, stream: bool) -> None:
    """Although the policy prefers the device: the continuation goes to the cloud, with its own token, uncached."""
    first = await box.ask(tags="cloud", stream=stream, temperature=0)
    box.cloud.resume, box.cloud.headers = "", {}
    rest = await box.ask(stream=stream, temperature=0, causeway={"continue": first.resume})
    assert (rest.status, rest.text, rest.resume) == (200, CLOUD, "")
    assert (rest.headers["x-causeway-target"], rest.headers["x-causeway-reason"]) == ("large", "continued")
    assert rest.headers["x-causeway-cache"] == "bypass"
    sent, again = box.cloud.bodies
    assert "causeway" not in sent
    assert again == {**sent, "causeway": {"continue": TOKEN}}
    assert box.cloud.request_headers[-1]["cache-control"] == "no-store"


async def test_no_other_target_can_continue(box: Box) -> None:
    """With the cloud unreachable: an error, not an answer of the device that starts over."""
    first = await box.ask(tags="cloud")
    box.cloud.fault = "refuse"
    rest = await box.ask(causeway={"continue": first.resume})
    assert (rest.status, rest.code) == (502, "all_attempts_failed")
    assert "small" not in rest.message


async def test_a_continue_token_does_not_override_a_constraint(box: Box) -> None:
    rest = await box.ask(tags="private", causeway={"continue": f"large~{TOKEN}"})
    assert (rest.status, rest.code) == (503, "no_route")
    assert box.cloud.bodies == []


@pytest.mark.parametrize("token", [TOKEN, f"small~{TOKEN}", f"gone~{TOKEN}"])
async def test_a_token_of_no_cloud_target_is_a_400(box: Box, token: str) -> None:
    """Without a target, of an edge target, or of one that the policy no longer has: 400, and no call."""
    rest = await box.ask(causeway={"continue": token})
    assert (rest.status, rest.code) == (400, "invalid_value")
    assert box.cloud.bodies == []


async def test_a_token_that_the_cloud_rejects_is_a_400(box: Box) -> None:
    """With the cloud's message."""
    box.cloud.status, box.cloud.error = 400, {"message": "has expired", "param": "causeway.continue"}
    rest = await box.ask(causeway={"continue": f"large~{TOKEN}"})
    assert (rest.status, rest.message) == (400, "has expired")
