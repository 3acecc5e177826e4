"""Gateways as processes, one of which is killed while it makes an answer that the other follows."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.redis_server import RedisServer

from .served import ASK

pytestmark = pytest.mark.redis
ROOT = Path(__file__).parents[2]
LEASE_S = 1.0
CONFIG = """
server: {{port: 0}}
redis: {url}
cache: {{enabled: true, key_prefix: {prefix}, lease_s: {lease}, redis_timeout_s: 0.25}}
"""


class Process:
    """`say` lets its service say that many words more."""

    def __init__(self, config: Path) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "tests.cloud_cache.served", str(config)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        assert line.startswith("ready url="), line
        self.url = line.split("=", 1)[1].strip() + "/v1/chat/completions"

    def say(self, words: int = 1) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write("\n" * words)
        self.popen.stdin.flush()

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()


@pytest.fixture
def processes(redis_server: RedisServer, tmp_path: Path) -> Iterator[tuple[Process, Process]]:
    path = tmp_path / "gateway.yaml"
    path.write_text(CONFIG.format(url=redis_server.url, prefix=f"p{time.monotonic_ns()}", lease=LEASE_S))
    made = [Process(path)]
    try:
        made.append(Process(path))
        yield made[0], made[1]
    finally:
        for process in made:
            process.kill()


async def test_a_leader_is_killed(processes: tuple[Process, Process]) -> None:
    """kill -9 of the gateway that makes an answer: its own client is cut off; a streaming follower and a whole one on
    another gateway get all of it after the lease has run out, and the next who asks gets it from the cache."""
    leader, other = processes
    async with aiohttp.ClientSession() as session:
        leader.say(1)
        cut_off = await session.post(leader.url, json={**ASK, "stream": True})
        assert cut_off.headers["x-causeway-cache"] == "miss"
        await cut_off.content.readuntil(b'"one "')
        async with session.post(other.url, json={**ASK, "stream": True}) as follower:
            assert follower.headers["x-causeway-cache"] == "coalesced"
            await follower.content.readuntil(b'"one "')
            leader.kill()
            other.say(9)
            rest = await follower.text()
        assert rest.count("three") == 1
        assert '"one "' not in rest
        assert rest.endswith("data: [DONE]\n\n")
        with pytest.raises(aiohttp.ClientPayloadError):
            await cut_off.content.read()
        async with session.post(other.url, json=ASK) as hit:
            assert hit.headers["x-causeway-cache"] in ("hit", "coalesced")
            assert (await hit.json())["choices"][0]["message"]["content"] == "one two three"


async def test_nobody_waits_for_the_dead_beyond_their_deadline(processes: tuple[Process, Process]) -> None:
    """A follower with less time left than the dead leader's lease gets its own deadline's error, in time."""
    leader, other = processes
    async with aiohttp.ClientSession() as session:
        leader.say(1)
        async with session.post(leader.url, json={**ASK, "stream": True}) as leading:
            await leading.content.readuntil(b'"one "')
            leader.kill()
            headers = {"x-causeway-deadline-ms": "200"}
            async with session.post(other.url, json=ASK, headers=headers) as late:
                assert late.status == 504
                assert (await late.json())["error"]["code"] == "deadline_exceeded"
