"""Gateways as processes, one of which is killed while it generates an answer that the other follows."""

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
ROOT = Path(__file__).parents[3]
LEASE_S = 4.0
CONFIG = """
server: {{port: 0}}
redis: {url}
cache: {{enabled: true, key_prefix: {prefix}, lease_s: {lease}, redis_timeout_s: 1.0}}
"""


class Process:
    """A gateway process; `send_words` lets its service send that many words more."""

    def __init__(self, config: Path) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "tests.cloud_pool.cache.served", str(config)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        assert line.startswith("ready url="), line
        self.url = line.split("=", 1)[1].strip() + "/v1/chat/completions"

    def send_words(self, words: int = 1) -> None:
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


async def test_leader_is_killed(processes: tuple[Process, Process]) -> None:
    """Its own client is cut off; a streaming and a whole follower on another gateway get the whole answer after
    the lease has expired, and the next request gets it from the cache."""
    leader, other = processes
    async with aiohttp.ClientSession() as session:
        leader.send_words(1)
        cut_off = await session.post(leader.url, json={**ASK, "stream": True})
        assert cut_off.headers["x-causeway-cache"] == "miss"
        await cut_off.content.readuntil(b'"one "')
        async with session.post(other.url, json={**ASK, "stream": True}) as follower:
            assert follower.headers["x-causeway-cache"] == "coalesced"
            await follower.content.readuntil(b'"one "')
            leader.kill()
            other.send_words(9)
            rest = await follower.text()
        assert rest.count("three") == 1
        assert '"one "' not in rest
        assert rest.endswith("data: [DONE]\n\n")
        with pytest.raises(aiohttp.ClientPayloadError):
            await cut_off.content.read()
        async with session.post(other.url, json=ASK) as hit:
            assert hit.headers["x-causeway-cache"] in ("hit", "coalesced")
            assert (await hit.json())["choices"][0]["message"]["content"] == "one two three"


async def test_follower_of_a_dead_leader_fails_at_its_own_deadline(processes: tuple[Process, Process]) -> None:
    leader, other = processes
    async with aiohttp.ClientSession() as session:
        leader.send_words(1)
        async with session.post(leader.url, json={**ASK, "stream": True}) as leading:
            await leading.content.readuntil(b'"one "')
            leader.kill()
            headers = {"x-causeway-deadline-ms": "200"}
            async with session.post(other.url, json=ASK, headers=headers) as late:
                assert late.status == 504
                assert (await late.json())["error"]["code"] == "deadline_exceeded"
