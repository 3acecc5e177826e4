"""The semantic cache in a whole daemon: what it answers, what it refuses, and that others pay nothing for it."""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from causeway_server.edge_node.config.schema import KeyConfig, ServerConfig
from causeway_server.edge_node.signals.semantic import SemanticAnswers
from causeway_server.models.catalog.artifact import ArtifactNotFound
from causeway_server.router.policy.compiled import parse_policy

from ..device import POLICY, Device, running

SEMANTIC = POLICY.replace(
    "    exact: {ttl: 30s, stale_if_error: 10m}\nlimits",
    "    exact: {ttl: 30s, stale_if_error: 10m}\n    semantic: {ttl: 20s, max_error: 0.01}\nlimits",
)
ASKED = "what is the weather in paris"
POLITE = "Hey, what's the weather in paris?"


def test_the_policy_of_these_tests_is_semantic() -> None:
    assert parse_policy(SEMANTIC).cache[1].semantic is not None


async def test_a_question_that_means_the_same_gets_the_answer(tmp_path: Path) -> None:
    """The header says so; similarity and age are in the decision record; the route is explained."""
    async with running(tmp_path, policy=SEMANTIC) as device:
        first = await device.ask(ASKED, temperature=0)
        second = await device.ask(POLITE, temperature=0)
        assert (first.headers["x-causeway-cache"], second.headers["x-causeway-cache"]) == ("miss", "semantic")
        assert second.text == first.text
        assert second.headers["x-causeway-route"] == "cache"
        outcome = (await device.record(second)).outcome
        assert outcome.cache == "semantic"
        assert outcome.similarity is not None
        assert 0.5 < outcome.similarity <= 1.001
        assert outcome.cache_age_s is not None
        assert len(device.engine.calls) == 1
        body = {"model": "auto", "temperature": 0, "messages": [{"role": "user", "content": POLITE}]}
        async with device.session.post("/v1/route", json=body) as response:
            explained = await response.json()
        assert explained["similarity"] == pytest.approx(outcome.similarity)
        assert 0 <= explained["cached_age_s"] < 20
        device.assert_nothing_leaks()


async def test_streamed_too(tmp_path: Path) -> None:
    async with running(tmp_path, policy=SEMANTIC) as device:
        first = await device.ask(ASKED, temperature=0)
        second = await device.ask(POLITE, temperature=0, stream=True)
        assert second.headers["x-causeway-cache"] == "semantic"
        assert second.text == first.text
        assert second.done


async def test_an_equal_request_is_an_exact_hit(tmp_path: Path) -> None:
    async with running(tmp_path, policy=SEMANTIC) as device:
        await device.ask(ASKED, temperature=0)
        again = await device.ask(ASKED, temperature=0)
        assert again.headers["x-causeway-cache"] == "hit"
        outcome = (await device.record(again)).outcome
        assert outcome.similarity is None
        assert outcome.cache_age_s is not None


@pytest.mark.parametrize(
    "differing",
    [
        {"max_tokens": 7},
        {"seed": 3},
        {"response_format": {"type": "json_object"}},
        {"stop": ["x"]},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]},
        {"temperature": 0.7},
        {"model": "small"},
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": POLITE}]},
        {
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "hello"},
                {"role": "user", "content": POLITE},
            ]
        },
    ],
    ids=lambda body: next(iter(body)),
)
async def test_nothing_else_in_the_request_may_differ(tmp_path: Path, differing: dict[str, object]) -> None:
    async with running(tmp_path, policy=SEMANTIC) as device:
        await device.ask(ASKED, temperature=0)
        body: dict[str, object] = {"temperature": 0} | differing
        assert (await device.ask(POLITE, **body)).headers["x-causeway-cache"] in ("miss", "bypass")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "other", ["what is the weather in rome", "what was the weather in paris", "what is the weather in paris tomorrow"]
)
async def test_another_question_is_a_miss(tmp_path: Path, other: str) -> None:
    async with running(tmp_path, policy=SEMANTIC) as device:
        await device.ask(ASKED, temperature=0)
        assert (await device.ask(other, temperature=0)).headers["x-causeway-cache"] == "miss"
        assert len(device.engine.calls) == 2


async def test_a_private_question_is_remembered_in_memory_only(tmp_path: Path) -> None:
    """It may be found again on this device by the same client, and by no request that is not private."""
    async with running(tmp_path, policy=SEMANTIC) as device:
        await device.ask(ASKED, temperature=0, tags="private")
        assert (await device.ask(POLITE, temperature=0)).headers["x-causeway-cache"] == "miss"
        assert (await device.ask(POLITE, temperature=0, tags="private")).headers["x-causeway-cache"] == "semantic"
    found = [path for path in (tmp_path / "state").rglob("*") if path.is_file() and b"paris" in path.read_bytes()]
    # The public request's answer may be on disk; questions never are.
    assert all(b"weather in paris" not in path.read_bytes() for path in found)


async def test_without_a_semantic_rule_nothing_is_compared(device: Device) -> None:
    await device.ask(ASKED, temperature=0)
    assert (await device.ask(POLITE, temperature=0)).headers["x-causeway-cache"] == "miss"


@pytest.mark.slow
def test_without_a_semantic_rule_nothing_is_imported() -> None:
    """Neither the judge nor numpy nor ONNX Runtime, by what the service imports and by activating a policy."""
    program = (
        "import sys; from causeway_server.edge_node.serving import service\n"
        "from causeway_server.edge_node.signals.semantic import SemanticAnswers\n"
        "from causeway_server.router.policy.compiled import parse_policy\n"
        f"SemanticAnswers().activate(parse_policy({POLICY!r}))\n"
        "print([name for name in sys.modules if name.startswith(('causeway_server.models.semantic', 'onnxruntime'))])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_without_a_judge_the_cache_stays_off(caplog: pytest.LogCaptureFixture) -> None:
    """The policy still holds, and a warning says what is missing."""

    def missing(_: object) -> None:
        raise ArtifactNotFound("no artifact computes same-answer")

    answers = SemanticAnswers(load=missing)  # type: ignore[arg-type]
    answers.activate(parse_policy(SEMANTIC))
    assert "no artifact computes same-answer" in caplog.text
    assert len(answers) == 0


async def test_clients_never_share(tmp_path: Path) -> None:
    """The exact cache shares an answer between keys; the semantic cache does not."""
    keys = tuple(KeyConfig(name, hashlib.sha256(name.encode()).hexdigest()) for name in ("ann", "bob"))
    async with running(tmp_path, policy=SEMANTIC, server=ServerConfig(port=0, keys=keys)) as device:
        ann, bob = ({"Authorization": f"Bearer {name}"} for name in ("ann", "bob"))
        await device.ask(ASKED, temperature=0, headers=ann)
        assert (await device.ask(ASKED, temperature=0, headers=bob)).headers["x-causeway-cache"] == "hit"
        assert (await device.ask(POLITE, temperature=0, headers=bob)).headers["x-causeway-cache"] == "miss"
        assert (await device.ask(POLITE, temperature=0, headers=ann)).headers["x-causeway-cache"] in ("semantic", "hit")


async def test_an_answer_that_is_too_old_is_not_shared(tmp_path: Path) -> None:
    policy = SEMANTIC.replace("semantic: {ttl: 20s", "semantic: {ttl: 1ms")
    async with running(tmp_path, policy=policy) as device:
        await device.ask(ASKED, temperature=0)
        await asyncio.sleep(0.002)
        assert (await device.ask(POLITE, temperature=0)).headers["x-causeway-cache"] == "miss"
