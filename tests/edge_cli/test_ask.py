"""`ask` and `route` against the daemon itself: what they print, and how they end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from edge_node.cli.main import main
from tests.edge.box import Box, running


@pytest.fixture
async def box(tmp_path: Path) -> AsyncIterator[Box]:
    async with running(tmp_path) as started:
        yield started


async def run(box: Box, *arguments: str, stdin: str = "") -> Result:
    """A command against the box, in a thread of its own."""
    url = f"http://127.0.0.1:{box.app.port}"
    return await asyncio.to_thread(CliRunner().invoke, main, [*arguments, "--url", url], input=stdin)


async def test_ask_prints_the_answer_and_where_it_came_from(box: Box) -> None:
    """The answer alone on stdout; route, target, reason, cache and times on stderr."""
    result = await run(box, "ask", "hello")
    assert (result.exit_code, result.stdout) == (0, "edge says so\n")
    for told in ("edge → small", "because edge-first", "cache miss", "first token", "total", "test@"):
        assert told in result.stderr


async def test_ask_again_is_told_to_come_from_the_cache(box: Box) -> None:
    """The default temperature of 0 may be cached."""
    await run(box, "ask", "hello")
    result = await run(box, "ask", "hello", "--no-stream")
    assert result.stdout == "edge says so\n"
    assert "cache hit" in result.stderr


async def test_ask_reads_stdin_and_hands_on_wishes(box: Box) -> None:
    """`-` is stdin; tags and preference reach the policy."""
    result = await run(box, "ask", "-", "--prefer", "only_cloud", "--tag", "a", "--max-tokens", "5", stdin="hello\n")
    assert result.stdout == "cloud says so\n"
    assert box.cloud.bodies[0]["max_tokens"] == 5
    assert box.newest().tags == ("a",)


async def test_ask_for_machines(box: Box) -> None:
    """One JSON document with the decision in it."""
    document = json.loads((await run(box, "ask", "hello", "--json")).stdout)
    assert document["text"] == "edge says so"
    assert document["decision"]["target"] == "small"
    assert document["decision"]["first_token_ms"] > 0


async def test_a_refusal_is_exit_code_1(box: Box) -> None:
    """With the status, the code and the message."""
    result = await run(box, "ask", "hello", "--tag", "private", "--prefer", "only_cloud")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "503 no_route" in result.stderr


async def test_a_break_in_mid_answer_is_not_exit_code_0(box: Box) -> None:
    """What had come stays on stdout, and the code says that it is not all."""
    box.engine.fault = "die"
    result = await run(box, "ask", "hello", "--tag", "edge")
    assert result.exit_code == 1
    assert result.stdout.startswith("edge ")
    assert "engine_crashed" in result.stderr


async def test_no_daemon_is_exit_code_3() -> None:
    """And says how to start one."""
    result = await asyncio.to_thread(CliRunner().invoke, main, ["ask", "hello", "--url", "http://127.0.0.1:9"])
    assert result.exit_code == 3
    assert "causeway-edge serve" in result.stderr


async def test_no_question_is_exit_code_2(box: Box) -> None:
    """Nothing is asked of the daemon."""
    assert (await run(box, "ask", "-", stdin=" \n")).exit_code == 2
    assert (await run(box, "ask", "hello", "--prefer", "somewhere")).exit_code == 2


async def test_route_lays_out_rules_and_attempts(box: Box) -> None:
    """Tried, held, attempts in order, the cache, and the signals; nothing was run."""
    result = await run(box, "route", "hello", "--tag", "handoff")
    assert result.exit_code == 0
    for told in ("unsure", "did not hold", "held", "1.", "small", "2.", "large", "hands off when under 0.5"):
        assert told in result.stdout
    assert "would be kept for 30 s" in result.stdout
    assert (box.engine.calls, box.cloud.bodies) == ([], [])


async def test_route_says_what_a_constraint_cut(box: Box) -> None:
    """A private question has no way to the cloud, and the explanation says so."""
    result = await run(box, "route", "hello", "--tag", "private")
    assert "private-stays" in result.stdout
    assert "constraint cut large" in result.stdout
    assert "bound to the device" in result.stdout


async def test_route_says_when_nothing_is_left(box: Box) -> None:
    """No attempts: the reasons stand alone."""
    result = await run(box, "route", "hello", "--tag", "private", "--prefer", "only_cloud")
    assert result.exit_code == 0
    assert "503" in result.stdout


async def test_route_for_machines(box: Box) -> None:
    """The box's own document."""
    document = json.loads((await run(box, "route", "hello", "--json")).stdout)
    assert document["decision"]["rule"] == "edge-first"
