"""The choice of agents' bed, and kill -9 of a device and of a gateway in the middle of a session."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from tests.redis_server import RedisServer
from tests.redis_server import redis_server as redis_server  # a fixture

from .agents import POLICY, SESSION, Agent, AgentCloud, Scripts, compared, run

pytestmark = pytest.mark.slow
EDGE = """
version: 1
name: killed
targets: {medium: {at: cloud, model: m-medium}, large: {at: cloud, model: m-large}}
routes:
  - {name: hard, when: '"hard" in request.tags', use: [large]}
  - {name: otherwise, use: [medium]}
session: {mode: require}
"""


def test_a_session_switches_less_when_its_prefix_counts() -> None:
    rows, _ = compared(2000, 1)
    assert [row.name for row in rows if row.holds is not True] == []


async def test_agents_of_a_device_that_starts_again_and_again() -> None:
    """Requests are cut and refused at each end of a daemon, and repeated untagged. Without `session` the same leaks."""
    policy = POLICY + SESSION.replace("PIN", "tool_loop").replace("MODE", "require")
    scripts, ended = await run(160, 1, policy, each=40)
    assert (scripts.foreign, scripts.leaked) == ([], [])
    assert ended["starts"] >= 3
    assert any(tag.startswith("agent-") for tag in scripts.known)
    loose, _ = await run(80, 1, POLICY)
    assert loose.foreign
    assert loose.leaked


@asynccontextmanager
async def killable(module: str, *command: str) -> AsyncIterator[str]:
    """A process of ours, which is killed at the end. Yields its URL."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *command, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        line = b""
        while not line.startswith(b"ready url="):
            line = await process.stdout.readline()
            assert line, "it ended before it was ready"
        yield line.partition(b"=")[2].decode().split()[0]
    finally:
        process.kill()
        await process.wait()


async def turn(url: str, one: Agent, words: str, *, model: str = "auto", tags: str = "") -> str:
    """One turn; returns the session's header."""
    one.say(words)
    headers = {"x-causeway-tags": tags} if tags else {}
    path, body = one.request(headers, stream=False)
    async with (
        aiohttp.ClientSession() as session,
        session.post(url.removesuffix("/v1") + path, json={**body, "model": model}, headers=headers) as response,
    ):
        data = await response.read()
        assert response.status == 200, data
        one.take(data, stream=False)
        return response.headers["x-causeway-session"]


async def test_a_killed_device_keeps_the_session(tmp_path: Path) -> None:
    """The answer was complete; the next turn comes after kill -9."""
    scripts = Scripts(1, faults=False)
    cloud = AgentCloud(scripts)
    await cloud.start()
    (tmp_path / "policy.yaml").write_text(EDGE)
    document = {
        "policy": str(tmp_path / "policy.yaml"),
        "state_dir": str(tmp_path / "state"),
        "server": {"port": 0},
        "engine": {"enabled": False},
        "clouds": {"main": {"url": cloud.url}},
        "log": "error",
    }
    (tmp_path / "edge.yaml").write_text(json.dumps(document))
    one = Agent("history", 0, random.Random(0))
    for number, (tags, expected) in enumerate((("hard", "new"), ("", "stayed; reason=pinned: the tool's result"))):
        async with killable("causeway_server.edge_node", "serve", "--config", str(tmp_path / "edge.yaml")) as url:
            assert await turn(url, one, "tools=3", tags=tags) == expected
            if number:
                assert await turn(url, one, "") == expected
    assert scripts.foreign == []
    await cloud.stop()


@pytest.mark.redis
async def test_a_killed_gateway_leaves_the_session_to_another(tmp_path: Path, redis_server: RedisServer) -> None:
    """`large` is away at first, so that `medium` asks for the tool; it is back when the other gateway goes on."""
    scripts = Scripts(1, faults=False)
    clouds = {name: AgentCloud(scripts) for name in ("large", "medium")}
    for cloud in clouds.values():
        await cloud.start()
    tiers = [
        {
            "name": name,
            "model": f"m-{name}",
            "can": ["chat"],
            "max_attempts": 1,
            "upstream": {"kind": "openai", "urls": [cloud.url], "verify_features": False},
        }
        for name, cloud in clouds.items()
    ]
    document = {
        "server": {"port": 0},
        "operator": {"port": 0},
        "redis": redis_server.url,
        "degradation": {"tiers": ["large", "medium"], "warm_up_after_idle_s": 0, "sessions": {"mode": "require"}},
        "tiers": tiers,
        "log": "error",
    }
    commands = []
    for number in range(2):
        (tmp_path / f"{number}.yaml").write_text(json.dumps({**document, "state_dir": str(tmp_path / str(number))}))
        commands.append(("serve", "--config", str(tmp_path / f"{number}.yaml")))
    one = Agent("history", 0, random.Random(0))
    async with killable("causeway_server.cloud_pool", *commands[1]) as other:
        async with killable("causeway_server.cloud_pool", *commands[0]) as url:
            clouds["large"].status = 503
            assert await turn(url, one, "tools=2", model="large") == "new"
        clouds["large"].status = 200
        for _ in range(2):
            assert (await turn(other, one, "", model="large")).startswith("stayed")
    assert scripts.foreign == []
    for cloud in clouds.values():
        await cloud.stop()
