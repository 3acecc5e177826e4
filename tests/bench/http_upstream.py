"""`python -m tests.bench http-upstream [--rounds N]`: what the gateway adds before a server with OpenAI's HTTP API.

The scripted server (in this process), the gateway and the edge daemon are real processes on sockets. One stream at a
time goes to the server itself, through the edge and through the gateway, in turns; an added time is the median of the
differences to the server's own in the same turn. Then clients in a process of their own, which is killed, leave their
streams, and the server counts what still runs.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path

import aiohttp

from tests.edge_node.scripted import ScriptedCloud
from tests.stack import TOKEN, Stack
from tests.waiting import until

from .rows import Row

MAX_OF_EDGE = 1.3
_WARM = 20
_POLICY = "version: 1\nname: bench\ntargets:\n  m: {at: cloud, model: m}\nroutes:\n  - {name: all, use: [m]}\n"
_BODY = {"model": "m", "messages": [{"role": "user", "content": "hello there"}], "stream": True}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=400, help="streams through each of the three")
    parser.add_argument("--leaving", type=int, default=500, help="clients that leave their streams")


async def main(arguments: argparse.Namespace) -> list[Row]:
    cloud = await ScriptedCloud().start()
    with tempfile.TemporaryDirectory(prefix="causeway-http-upstream-") as folder:
        stack = Stack(Path(folder))
        try:
            await asyncio.to_thread(_start, stack, cloud)
            urls = {"server": cloud.url, "edge": f"{stack.edge_url}/v1", "gateway": f"{stack.gateway_url}/v1"}
            headers, connections = {"authorization": f"Bearer {TOKEN}"}, aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(headers=headers, connector=connections) as session:
                rows = await _added(session, urls, arguments.rounds)
                rows += await _left(urls["gateway"], cloud, arguments.leaving)
        finally:
            for part in stack.parts.values():
                await asyncio.to_thread(part.kill)
    await cloud.stop()
    return rows


def _start(stack: Stack, cloud: ScriptedCloud) -> None:
    policy = stack.folder / "policy.yaml"
    policy.write_text(_POLICY)
    upstream = f"{{kind: openai, urls: ['{cloud.url}'], verify_features: false}}"
    tiers = f"tiers:\n  - {{name: m, concurrency: 1024, max_queued: 1024, upstream: {upstream}}}\n"
    # The server keeps every stream waiting at the end: a probe of the silent server would count as a client's stream.
    stack.start_gateway(config=f"load_balancing: {{silent_before_probe_s: 600}}\n{tiers}")
    stack.start_edge(f"policy: {policy}\n", cloud_port=cloud.port)
    for part in stack.parts.values():
        part.ready()


async def _added(session: aiohttp.ClientSession, urls: dict[str, str], rounds: int) -> list[Row]:
    took: dict[str, list[float]] = {name: [] for name in urls}
    orders = list(itertools.permutations(urls))  # what a server does after its answer is in the way of the next one's
    for turn in range(_WARM + rounds):
        for name in orders[turn % len(orders)]:
            seconds = await _first_token_s(session, urls[name])
            if turn >= _WARM:
                took[name].append(seconds)
    direct = took.pop("server")
    added = {
        name: statistics.median(through - own for through, own in zip(times, direct, strict=True)) * 1000.0
        for name, times in took.items()
    }
    own = statistics.median(direct) * 1000.0
    note = f"edge {added['edge']:.3f} ms, gateway {added['gateway']:.3f} ms, server {own:.3f} ms"
    what = "median time added to the first token, gateway / edge"
    return [Row(what, added["gateway"] / added["edge"], "x", MAX_OF_EDGE, note=note)]


async def _first_token_s(session: aiohttp.ClientSession, url: str) -> float:
    began = time.perf_counter()
    async with session.post(f"{url}/chat/completions", json=_BODY) as response:
        assert response.status == 200, await response.text()
        await response.content.readline()
        seconds = time.perf_counter() - began
        await response.read()
    return seconds


async def _left(url: str, cloud: ScriptedCloud, clients: int) -> list[Row]:
    cloud.gate = asyncio.Event()
    command = (sys.executable, "-m", "tests.bench.http_upstream", url, str(clients))
    process = await asyncio.create_subprocess_exec(*command)
    await until(lambda: cloud.running == clients)
    process.kill()
    began = time.perf_counter()
    await until(lambda: cloud.running == 0)
    await process.wait()
    what = f"time from the moment when {clients} clients leave to the moment when the server runs no request"
    return [Row(what, time.perf_counter() - began, "s", 1.0)]


async def _ask(url: str, clients: int) -> None:
    """Wait for streams that never begin."""
    headers, connections = {"authorization": f"Bearer {TOKEN}"}, aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(headers=headers, connector=connections) as session:
        await asyncio.gather(*(_first_token_s(session, url) for _ in range(clients)))


if __name__ == "__main__":
    asyncio.run(_ask(sys.argv[1], int(sys.argv[2])))
