"""Retries as a caller of the gateway sees them: one endpoint of the tier is dead, the other a real Triton."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import anyio
import pytest

from tests.cloud_pool.conftest import PATIENCE_S, Command, Pool, pool, triton_environment
from tests.ports import free_port

__all__ = ["pool", "triton_environment"]

pytestmark = [pytest.mark.triton, pytest.mark.engine]

CONFIG = """
server: {{port: 0, readiness_cache_s: 0}}
degradation: {{warm_up_after_idle_s: 0}}  # a warm-up would detect the dead endpoint first
tiers:
  - {{name: large, artifact: assistant-large, model: assistant-large, endpoints: ["127.0.0.1:{dead}", "{live}"]}}
  - {{name: gone, artifact: assistant-large, model: assistant-large, endpoints: ["127.0.0.1:{dead}"]}}
"""


async def test_callers_do_not_see_a_dead_endpoint(pool: Pool, tmp_path: Path) -> None:
    """Where no other endpoint exists, the caller gets an error at once, with Retry-After."""
    path = tmp_path / "gateway.yaml"
    path.write_text(CONFIG.format(dead=free_port(), live=pool.grpc))
    command = Command("serve", "--config", str(path))
    try:
        ready = command.ready()
        url, operator = ready["url"], ready["operator"]
        async with aiohttp.ClientSession() as http:

            async def send(tier: str) -> aiohttp.ClientResponse:
                body = {"model": tier, "prompt": "a", "max_tokens": 1}
                async with http.post(f"{url}/completions", json=body) as reply:
                    await reply.read()
                    return reply

            with anyio.fail_after(PATIENCE_S):
                replies = await asyncio.gather(*(send("large") for _ in range(6)))
                alone = await send("gone")
                async with http.get(f"{operator}/metrics") as reply:
                    metrics = await reply.text()
        assert [reply.status for reply in replies] == [200] * 6
        assert 1 <= count(metrics, 'causeway_gateway_retries_total{code="cloud_unreachable",tier="large"}') <= 5
        assert alone.status == 503
        assert int(alone.headers["retry-after"]) >= 1
        assert 'causeway_gateway_retries_total{code="cloud_unreachable",tier="gone"}' not in metrics
        assert command.stop() == 0
    finally:
        command.process.kill()


def count(metrics: str, series: str) -> float:
    (line,) = (line for line in metrics.splitlines() if line.startswith(f"{series} "))
    return float(line.rsplit(" ", 1)[1])
