"""An answer that the cloud cut short, and its rest: asked for with the very same request and the token."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from .box import Box, running
from .scripted import CLOUD_WORDS

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
async def test_a_cut_answer_says_how_to_go_on(box: Box, stream: bool) -> None:
    """Marked as less than was asked for, with a token that names the target; and it is not kept."""
    for _ in range(2):
        answer = await box.ask(tags="cloud", stream=stream, temperature=0)
        assert (answer.status, answer.text, answer.resume) == (200, CLOUD, f"large~{TOKEN}")
        assert answer.headers["x-causeway-degraded"] == "true"
        assert answer.headers["x-causeway-cache"] == "miss"
    assert len(box.cloud.bodies) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_the_rest_is_asked_of_whom_it_came_from(box: Box, stream: bool) -> None:
    """The policy would ask the device first: a continuation goes to the cloud, with the cloud's own token, no cache."""
    first = await box.ask(tags="cloud", stream=stream, temperature=0)
    box.cloud.resume, box.cloud.headers = "", {}
    rest = await box.ask(stream=stream, temperature=0, causeway={"continue": first.resume})
    assert (rest.status, rest.text, rest.resume) == (200, CLOUD, "")
    assert (rest.headers["x-causeway-target"], rest.headers["x-causeway-reason"]) == ("large", "continued")
    assert rest.headers["x-causeway-cache"] == "bypass"
    sent, again = box.cloud.bodies
    assert "causeway" not in sent
    assert again == {**sent, "causeway": {"continue": TOKEN}}
    assert box.cloud.asked[-1]["cache-control"] == "no-store"


async def test_nobody_else_can_go_on(box: Box) -> None:
    """The cloud is gone: an error that says so, and not an answer of the device that begins anew."""
    first = await box.ask(tags="cloud")
    box.cloud.fault = "refuse"
    rest = await box.ask(causeway={"continue": first.resume})
    assert (rest.status, rest.code) == (503, "all_attempts_failed")
    assert "small" not in rest.message


async def test_a_token_opens_no_way_around_the_policy(box: Box) -> None:
    """What has to stay on the device stays there."""
    rest = await box.ask(tags="private", causeway={"continue": f"large~{TOKEN}"})
    assert (rest.status, rest.code) == (503, "no_route")
    assert box.cloud.bodies == []


@pytest.mark.parametrize("token", [TOKEN, f"small~{TOKEN}", f"gone~{TOKEN}"])
async def test_a_token_of_nobody_is_a_bad_request(box: Box, token: str) -> None:
    """The cloud's own, the device's, or of a target that the policy has no more: 400, and nobody is asked."""
    rest = await box.ask(causeway={"continue": token})
    assert (rest.status, rest.code) == (400, "invalid_value")
    assert box.cloud.bodies == []


async def test_a_token_that_the_cloud_refuses_is_a_bad_request(box: Box) -> None:
    """An old one, say: in the cloud's words."""
    box.cloud.status, box.cloud.error = 400, {"message": "has expired", "param": "causeway.continue"}
    rest = await box.ask(causeway={"continue": f"large~{TOKEN}"})
    assert (rest.status, rest.message) == (400, "has expired")
