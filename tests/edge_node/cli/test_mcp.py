"""`causeway-edge mcp`: the official MCP client against a running daemon, over stdio and streamable HTTP."""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp_types import TextContent

from causeway_server.edge_node.cli.main import main
from causeway_server.edge_node.cli.mcp import build_server
from causeway_server.edge_node.config.schema import KeyConfig, OutboxConfig, ServerConfig
from tests.edge_node.device import Device, running
from tests.edge_node.jobs.cloud import JobCloud
from tests.edge_node.jobs.support import ended
from tests.ports import free_port
from tests.waiting import until

TOOLS = {"ask", "route", "explain_decision", "submit_job", "jobs"}
KEY = "a-device-key"
KEYED = ServerConfig(port=0, keys=(KeyConfig(name="agent", sha256=hashlib.sha256(KEY.encode()).hexdigest()),))


@pytest.fixture
async def device(tmp_path: Path) -> AsyncIterator[Device]:
    async with running(tmp_path, cloud=JobCloud(), jobs=OutboxConfig()) as started:
        yield started


def url_of(device: Device) -> str:
    return f"http://127.0.0.1:{device.app.port}"


def agent(device: Device, api_key: str = "") -> Client:
    """An agent in this process, beside the daemon."""
    return Client(build_server(url_of(device), api_key))


async def refusal(client: Client, tool: str, **arguments: Any) -> str:
    result = await client.call_tool(tool, arguments)
    assert result.is_error
    (text,) = result.content
    assert isinstance(text, TextContent)
    return text.text


@asynccontextmanager
async def serving_http(device: Device) -> AsyncIterator[str]:
    """Run `causeway-edge mcp --port` and yield its URL."""
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "causeway_server.edge_node", "mcp"),
        *("--port", str(port), "--url", url_of(device)),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stderr is not None
        async for line in process.stderr:
            if line.startswith(b"ready"):
                break
        url = f"http://127.0.0.1:{port}/mcp"
        yield url
    finally:
        process.terminate()
        await process.communicate()
    assert process.returncode == 0


async def test_an_agent_asks_and_learns_why_it_was_answered_there(device: Device) -> None:
    async with agent(device) as client:
        assert {tool.name for tool in (await client.list_tools()).tools} == TOOLS
        answer = await client.call_tool("ask", {"prompt": "hello", "tags": ["edge"]})
        assert answer.structured_content is not None
        assert answer.structured_content["text"] == "edge says so"
        decision = answer.structured_content["decision"]
        assert (decision["route"], decision["target"]) == ("edge", "small")
        record = await client.call_tool("explain_decision", {"decision_id": decision["id"]})
        assert record.structured_content is not None
        assert record.structured_content["id"] == decision["id"]


async def test_a_route_is_explained_without_running_it(device: Device) -> None:
    async with agent(device) as client:
        explained = await client.call_tool("route", {"prompt": "hello", "tags": ["cloud"]})
    assert explained.structured_content is not None
    assert explained.structured_content["decision"]["attempts"][0]["target"]["name"] == "large"
    assert device.cloud.bodies == []


async def test_a_job_is_submitted_once_for_a_key_and_read_with_its_answer(device: Device) -> None:
    async with agent(device) as client:
        arguments = {"prompt": "hello", "tags": ["edge"], "key": "k1"}
        first = (await client.call_tool("submit_job", arguments)).structured_content
        again = (await client.call_tool("submit_job", arguments)).structured_content
        assert first is not None
        assert again is not None
        assert first["id"] == again["id"]
        await ended(device, first["id"])
        listed = (await client.call_tool("jobs", {})).structured_content
        read = (await client.call_tool("jobs", {"job_id": first["id"]})).structured_content
        assert listed is not None
        assert read is not None
        assert [job["id"] for job in listed["jobs"]] == [first["id"]]
        assert read["jobs"][0]["answer"]["text"] == "edge says so"


async def test_a_private_request_stays_on_the_device(device: Device) -> None:
    async with agent(device) as client:
        message = await refusal(client, "ask", prompt="hello", tags=["private"], prefer="only_cloud")
    assert "no_route: Policy test@" in message
    assert device.cloud.bodies == []


@pytest.mark.parametrize(
    ("tool", "arguments", "message"),
    [
        ("ask", {"prompt": ""}, "prompt"),
        ("ask", {"prompt": "hello", "prefer": "somewhere"}, "prefer"),
        ("ask", {"prompt": "hello", "model": "unknown"}, "model_not_found"),
        ("ask", {}, "prompt"),
        ("explain_decision", {"decision_id": "unknown"}, "not_found"),
        ("jobs", {"job_id": "unknown"}, "not_found"),
        ("jobs", {"limit": 0}, "limit"),
    ],
)
async def test_a_bad_argument_is_named(device: Device, tool: str, arguments: dict[str, Any], message: str) -> None:
    async with agent(device) as client:
        assert message in await refusal(client, tool, **arguments)


async def test_a_failing_daemon_is_told_to_the_agent(device: Device) -> None:
    device.engine.fault = "die"
    async with agent(device) as client:
        assert "engine" in await refusal(client, "ask", prompt="hello", tags=["private"])


async def test_an_agent_that_gives_up_frees_the_device(device: Device) -> None:
    device.engine.gate = asyncio.Event()  # never opened
    async with agent(device) as client:
        asking = asyncio.create_task(client.call_tool("ask", {"prompt": "hello", "tags": ["edge"]}))
        await device.engine.entered.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(lambda: device.engine.running == 0)


async def test_no_daemon_is_told_to_the_agent() -> None:
    async with Client(build_server("http://127.0.0.1:9", "")) as client:
        assert "Cannot reach" in await refusal(client, "ask", prompt="hello")


async def test_over_stdio_the_key_of_the_command_is_used(tmp_path: Path) -> None:
    async with running(tmp_path, server=KEYED) as device:
        program = StdioServerParameters(
            command=sys.executable,
            args=["-m", "causeway_server.edge_node", "mcp", "--url", url_of(device)],
            env={"CAUSEWAY_API_KEY": KEY},
        )
        async with Client(program) as client:
            answer = await client.call_tool("ask", {"prompt": "hello"})
            assert answer.structured_content is not None
            assert answer.structured_content["text"] == "edge says so"
        assert device.newest().request.client == "agent"


async def test_over_http_each_caller_sends_its_own_key(tmp_path: Path) -> None:
    import httpx2

    async with running(tmp_path, server=KEYED) as device, serving_http(device) as url:
        headers = {"Authorization": f"Bearer {KEY}"}
        async with (
            httpx2.AsyncClient(headers=headers) as http,
            Client(streamable_http_client(url, http_client=http)) as client,
        ):
            answer = await client.call_tool("ask", {"prompt": "hello"})
            assert answer.structured_content is not None
            assert answer.structured_content["decision"]["target"] == "small"
        assert device.newest().request.client == "agent"
        async with Client(url) as nobody:
            assert "invalid_api_key" in await refusal(nobody, "ask", prompt="hello")
        two = [("Authorization", f"Bearer {KEY}"), ("Authorization", "Bearer another")]
        async with (
            httpx2.AsyncClient(headers=two) as http,
            Client(streamable_http_client(url, http_client=http)) as client,
        ):
            assert "authorization" in await refusal(client, "ask", prompt="hello")
        async with httpx.AsyncClient() as browser:
            rebound = await browser.post(url, json={}, headers={"host": "attacker.example"})
            foreign = await browser.post(url, json={}, headers={"origin": "http://attacker.example"})
        assert (rebound.status_code, foreign.status_code) == (421, 403)


def test_http_takes_no_key_of_its_own() -> None:
    """Every caller would act with it."""
    result = CliRunner().invoke(main, ["mcp", "--port", "8090", "--api-key", KEY])
    assert (result.exit_code, "Each caller sends its own API key" in result.stderr) == (2, True)
