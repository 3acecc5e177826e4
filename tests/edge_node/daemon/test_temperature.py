"""The temperature of a request that sets none: what is sent, what policies read, and whether the answer is cached."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..device import POLICY, Device, running

GREEDY = POLICY.replace("model: m-large\n", "model: m-large\n    temperature: 0\n").replace(
    "model: m-small\n", "model: m-small\n    temperature: 0\n"
)
NO_RULES = POLICY[: POLICY.index("cache:")] + POLICY[POLICY.index("limits:") :]


@pytest.mark.parametrize("tags", ["", "cloud"], ids=["edge", "cloud"])
async def test_targets_at_temperature_zero_are_cached_without_a_temperature(tmp_path: Path, tags: str) -> None:
    """The target's temperature is sent, and the cloud is not told to bypass its own cache."""
    async with running(tmp_path, policy=GREEDY) as device:
        answers = [await device.ask(tags=tags) for _ in range(2)]
        assert [answer.headers["x-causeway-cache"] for answer in answers] == ["miss", "hit"]
        if tags:
            assert device.cloud.bodies[0]["temperature"] == 0
            assert "cache-control" not in device.cloud.request_headers[0]
        else:
            assert device.engine.calls[0].request.sampling.temperature == 0


async def test_the_clients_temperature_takes_precedence(tmp_path: Path) -> None:
    async with running(tmp_path, policy=GREEDY) as device:
        answer = await device.ask(tags="cloud", temperature=0.7)
        assert answer.headers["x-causeway-cache-reason"] == "sampled: temperature above 0"
        assert device.cloud.bodies[0]["temperature"] == 0.7
        assert device.cloud.request_headers[0]["cache-control"] == "no-store"


async def test_a_manifests_temperature_counts_for_its_model(tmp_path: Path) -> None:
    """`assistant` ships with a manifest that says 0; only the cloud target has to declare it."""
    policy = GREEDY.replace("model: m-small\n    temperature: 0\n", "model: assistant\n")
    async with running(tmp_path, policy=policy) as device:
        assert [(await device.ask()).headers["x-causeway-cache"] for _ in range(2)] == ["miss", "hit"]


async def test_an_undeclared_temperature_counts_as_openais_and_is_not_sent(tmp_path: Path) -> None:
    async with running(tmp_path, policy=POLICY) as device:
        answer = await device.ask(tags="cloud")
        expected = "sampled: the request sets no temperature, and the policy's targets use up to 1"
        assert answer.headers["x-causeway-cache-reason"] == expected
        assert "temperature" not in device.cloud.bodies[0]


async def test_the_highest_temperature_of_the_targets_counts(tmp_path: Path) -> None:
    """Which of them will answer is not decided yet. A target that only makes embeddings does not count."""
    warm = GREEDY.replace("model: m-large\n    temperature: 0\n", "model: m-large\n    temperature: 0.5\n")
    async with running(tmp_path, policy=warm) as device:
        assert "use up to 0.5" in (await device.ask()).headers["x-causeway-cache-reason"]
    vectors = GREEDY.replace("constraints:", "  vectors: {at: cloud, model: m-vectors, can: [embedding]}\nconstraints:")
    async with running(tmp_path, policy=vectors) as device:
        assert (await device.ask()).headers["x-causeway-cache"] == "miss"


@pytest.mark.parametrize(
    ("policy", "body", "reason"),
    [
        (GREEDY, {"temperature": 1}, "sampled: temperature above 0"),
        (GREEDY, {"n": 2}, "sampled: n above 1"),
        (GREEDY, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "the request offers tools"),
        (NO_RULES, {}, "the policy has no cache rules"),
        (
            GREEDY.replace("when: request.temperature == 0.0\n", "when: request.stream\n"),
            {},
            "no cache rule of the policy holds",
        ),
        (
            GREEDY.replace("cache:\n", "cache:\n  - {name: live, when: request.n == 1}\n"),
            {},
            "the cache rule `live` excludes it",
        ),
    ],
)
async def test_header_record_and_route_say_why_the_cache_is_bypassed(
    tmp_path: Path, policy: str, body: dict[str, object], reason: str
) -> None:
    async with running(tmp_path, policy=policy) as device:
        answer = await device.ask(**body)  # type: ignore[arg-type]
        assert answer.headers["x-causeway-cache"] == "bypass"
        assert answer.headers["x-causeway-cache-reason"] == reason
        assert (await device.record(answer)).outcome.cache_reason == reason
        assert await planned_bypass(device, body) == reason


async def test_only_a_bypass_has_a_reason(tmp_path: Path) -> None:
    async with running(tmp_path, policy=GREEDY) as device:
        for status in ("miss", "hit"):
            answer = await device.ask()
            assert answer.headers["x-causeway-cache"] == status
            assert "x-causeway-cache-reason" not in answer.headers
            assert (await device.record(answer)).outcome.cache_reason == ""
        assert await planned_bypass(device, {}) == ""


async def planned_bypass(device: Device, body: dict[str, object]) -> str:
    document = {"model": "auto", "messages": [{"role": "user", "content": "hello"}], **body}
    async with device.session.post("/v1/route", json=document) as response:
        return str((await response.json())["cache"]["bypass"])
