"""`ask` and `route` against a running daemon: output and exit codes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from causeway_server.edge_node.cli.main import main
from tests.edge_node.device import POLICY, Device, running
from tests.waiting import until

ROOT = Path(__file__).parents[3]


@pytest.fixture
async def device(tmp_path: Path) -> AsyncIterator[Device]:
    async with running(tmp_path) as started:
        yield started


async def run(device: Device, *arguments: str, stdin: str = "") -> Result:
    """Run a command against the daemon, in a thread."""
    url = f"http://127.0.0.1:{device.app.port}"
    return await asyncio.to_thread(CliRunner().invoke, main, [*arguments, "--url", url], input=stdin)


async def test_ask_prints_the_answer_and_its_route(device: Device) -> None:
    """The answer goes to stdout; route, target, reason, cache and times to stderr."""
    result = await run(device, "ask", "hello")
    assert (result.exit_code, result.stdout) == (0, "edge says so\n")
    for text in ("edge → small", "reason edge-first", "cache bypass", "first token", "total", "test@"):
        assert text in result.stderr


async def test_a_repeated_ask_is_answered_from_the_cache(device: Device) -> None:
    await run(device, "ask", "hello", "--temperature", "0")
    result = await run(device, "ask", "hello", "--temperature", "0", "--no-stream")
    assert result.stdout == "edge says so\n"
    assert "cache hit" in result.stderr


async def test_ask_reads_stdin_and_passes_on_hints(device: Device) -> None:
    """Tags and preference reach the policy."""
    result = await run(device, "ask", "-", "--prefer", "only_cloud", "--tag", "a", "--max-tokens", "5", stdin="hello\n")
    assert result.stdout == "cloud says so\n"
    assert device.cloud.bodies[0]["max_tokens"] == 5
    assert device.newest().request.tags == ("a",)


async def test_ask_prints_json(device: Device) -> None:
    document = json.loads((await run(device, "ask", "hello", "--format", "json")).stdout)
    assert document["text"] == "edge says so"
    assert document["decision"]["target"] == "small"
    assert document["decision"]["first_token_ms"] > 0


async def test_a_rejected_request_is_exit_code_1(device: Device) -> None:
    result = await run(device, "ask", "hello", "--tag", "private", "--prefer", "only_cloud")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "503 no_route" in result.stderr


async def test_a_failure_during_the_answer_is_exit_code_1(device: Device) -> None:
    """The part that had arrived stays on stdout."""
    device.engine.fault = "die"
    result = await run(device, "ask", "hello", "--tag", "edge")
    assert result.exit_code == 1
    assert result.stdout.startswith("edge ")
    assert "engine_crashed" in result.stderr


async def test_no_daemon_is_exit_code_3() -> None:
    """The message says how to start it."""
    result = await asyncio.to_thread(CliRunner().invoke, main, ["ask", "hello", "--url", "http://127.0.0.1:9"])
    assert result.exit_code == 3
    assert "causeway-edge serve" in result.stderr


@pytest.mark.parametrize("flags", [(), ("--no-stream",), ("--format", "json")])
async def test_a_deadline_that_passes_is_exit_code_4(device: Device, flags: tuple[str, ...]) -> None:
    """The message says that the time is up, not an HTTP status."""
    device.engine.gate = asyncio.Event()  # never opened
    result = await run(device, "ask", "hello", "--tag", "edge", "--deadline-s", "0.1", *flags)
    assert (result.exit_code, result.stdout.strip()) == (4, "")
    assert "timed out: The deadline passed while small was answering" in result.stderr


async def test_a_deadline_that_passes_during_the_answer_is_exit_code_4(device: Device) -> None:
    device.engine.fault = "drip"
    result = await run(device, "ask", "hello", "--tag", "edge", "--deadline-s", "0.35")
    assert result.exit_code == 4
    assert result.stdout.startswith("edge ")
    assert "timed out: The deadline passed" in result.stderr


async def test_a_usage_error_is_exit_code_2(device: Device) -> None:
    assert (await run(device, "ask", "-", stdin=" \n")).exit_code == 2
    assert (await run(device, "ask", "hello", "--prefer", "somewhere")).exit_code == 2


@pytest.mark.parametrize("command", [("ask", "hello"), ("route", "hello"), ("jobs", "list"), ("listen", "-")])
def test_a_malformed_url_is_a_usage_error(command: tuple[str, ...]) -> None:
    result = CliRunner().invoke(main, [*command, "--url", "device:8080"], input="audio")
    assert (result.exit_code, "'device:8080' is not the URL of a device" in result.stderr) == (2, True)


def test_a_prompt_that_is_no_text_is_a_usage_error() -> None:
    """As Python hands over an argument, or stdin of the locale C, that is not UTF-8."""
    result = CliRunner().invoke(main, ["ask", "caf\udce9"])
    assert (result.exit_code, "not UTF-8 text" in result.stderr) == (2, True)


@pytest.mark.slow
async def test_ctrl_c_during_an_answer_is_exit_code_130(device: Device) -> None:
    """And stops the work: the daemon sees the client go."""
    device.engine.pause_after = 1
    command = [
        sys.executable,
        "-m",
        "causeway_server.edge_node",
        "ask",
        "hello",
        "--url",
        f"http://127.0.0.1:{device.app.port}",
    ]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    asking = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE, env=environ)
    assert asking.stdout is not None
    async with asyncio.timeout(60):
        assert await asking.stdout.readexactly(5) == b"edge "
        asking.send_signal(signal.SIGINT)
        _, complaint = await asking.communicate()
    assert (asking.returncode, complaint) == (130, b"")
    await until(lambda: device.engine.running == 0)


async def test_an_error_is_one_line_however_long_it_is(device: Device) -> None:
    result = await run(device, "ask", "hello", "--model", "x" * 200)
    assert f"Model `{'x' * 64}" in result.stderr.splitlines()[0]
    assert "Available: auto, small, large" in result.stderr.splitlines()[0]


async def test_route_promises_no_hit_that_would_not_happen(device: Device) -> None:
    """Neither command sends a temperature that the user did not give."""
    result = await run(device, "route", "hello")
    assert "cache    bypass: sampled: the request sets no temperature" in result.stdout
    await run(device, "ask", "hello", "--no-stream")
    assert device.newest().outcome.cache == "bypass"
    assert device.engine.calls[0].request.sampling.temperature is None


async def test_route_prints_rules_and_attempts(device: Device) -> None:
    """No target is asked."""
    result = await run(device, "route", "hello", "--tag", "handoff", "--temperature", "0")
    assert result.exit_code == 0
    for text in ("unsure", "did not hold", "held", "1.", "small", "2.", "large", "handoff if confidence is below 0.5"):
        assert text in result.stdout
    assert "would be fresh for 30 s" in result.stdout
    assert (device.engine.calls, device.cloud.bodies) == ([], [])


async def test_route_names_the_targets_that_a_constraint_excludes(device: Device) -> None:
    result = await run(device, "route", "hello", "--tag", "private")
    assert "private-stays" in result.stdout
    assert "constraint excluded large" in result.stdout
    assert "bound to the device" in result.stdout


async def test_route_says_when_no_attempt_is_left(device: Device) -> None:
    result = await run(device, "route", "hello", "--tag", "private", "--prefer", "only_cloud")
    assert result.exit_code == 0
    assert "503" in result.stdout


async def test_route_prints_json(device: Device) -> None:
    document = json.loads((await run(device, "route", "hello", "--format", "json")).stdout)
    assert document["decision"]["rule"] == "edge-first"


# --- drafts ----------------------------------------------------------------------------------------------------------


def draft(path: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["route", "hello", "--policy", str(path), *arguments], env={"COLUMNS": "200"})


def test_route_tries_a_draft_without_a_daemon(tmp_path: Path) -> None:
    """The request's flags and the signals that are set decide."""
    path = tmp_path / "draft.yaml"
    path.write_text(POLICY)
    result = draft(path, "--tag", "handoff", "--set", "down=large")
    assert result.exit_code == 0, result.output
    assert "unsure  test@" in result.stdout
    assert "unsure         large is down, so it is tried last" in result.stdout
    document = json.loads(draft(path, "--format", "json", "--prefer", "only_cloud").stdout)
    assert [plan["target"]["name"] for plan in document["decision"]["attempts"]] == ["large"]


def test_route_of_an_invalid_draft_names_the_mistake(tmp_path: Path) -> None:
    path = tmp_path / "draft.yaml"
    path.write_text(POLICY.replace("request.temperature == 0.0", "request.temperature = 0.0"))
    result = draft(path)
    assert result.exit_code == 1
    assert "write == to compare" in result.stderr
    assert draft(tmp_path / "none.yaml").exit_code == 2


def test_signals_can_only_be_set_for_a_draft() -> None:
    result = CliRunner().invoke(main, ["route", "hello", "--set", "device.cpu=1"])
    assert result.exit_code == 2
    assert "--set needs --policy" in result.output
