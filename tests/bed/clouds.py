"""A device with three clouds, of which one, two and again one are cut under load, and come back.

Each cloud is an OpenAI server of its own behind a relay. A cut relay drops every byte and accepts connections without
an answer, like a network that is gone; with `--refuse` it closes them, like a server that is gone. The load is open:
streams arrive at a fixed rate, whatever the answers do. Measured is the time to the first token, from 2 s after each
cut on, beside the same load with all clouds.

    python -m tests.bench clouds                 cuts in both orders: the first, the first two; the second, both
    python -m tests.bench clouds --seconds 5
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import aiohttp
from aiohttp import web

from tests.bench.rows import Row
from tests.edge_node.scripted import ScriptedCloud

from .figures import quantile, table

NAMES = ("eu", "us", "ap")
POLICY = """
version: 1
name: bed
targets: {large: {at: [cloud:eu, cloud:us, cloud:ap], model: m-large}}
routes: [{name: all, use: [large]}]
limits: {concurrent: 2000, queue: 2000}
"""
STAGES: tuple[tuple[str, ...], ...] = (("eu",), ("eu", "us"), ("us",), ("us", "ap"), ())
AFTER_S = 2.0
MAX_SLOWDOWN = 1.3
_START_S = 120.0
_THINK_S = 0.05  # a server's time to its first token


class SlowCloud(ScriptedCloud):
    """Takes `_THINK_S` for its first token."""

    async def _answer(self, request: web.Request, body: dict[str, object]) -> web.StreamResponse:
        await asyncio.sleep(_THINK_S)
        return await super()._answer(request, body)


class Network:
    """The way to one cloud, which can be cut: bytes vanish, or connections are closed."""

    def __init__(self, port: int, *, refuses: bool) -> None:
        self._upstream = port
        self._refuses = refuses
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.port = 0
        self.is_cut = False

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        self.is_cut = True
        if self._refuses:
            await self.stop()

    async def mend(self) -> None:
        """Carry bytes again; connections of before are reset, since bytes of theirs are lost."""
        self.is_cut = False
        self._abort()
        if self._refuses:
            await self.start()

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        self._abort()

    def _abort(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with contextlib.suppress(OSError):
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._upstream)
            self._writers.add(up_writer)
            await asyncio.gather(self._carry(reader, up_writer), self._carry(up_reader, writer))
        self._writers.discard(writer)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if not self.is_cut:
                    writer.write(data)
            if not self.is_cut:
                writer.close()


class Sample(NamedTuple):
    """A stream: when it began, its time to the first token, and whether it came to its end."""

    began: float
    ttft_ms: float
    ended: bool


@contextlib.asynccontextmanager
async def daemon(folder: Path, ports: dict[str, int]) -> AsyncIterator[str]:
    """`causeway-edge serve` in a process; yields its URL."""
    policy = folder / "policy.yaml"
    policy.write_text(POLICY)
    clouds = {name: {"url": f"http://127.0.0.1:{port}/v1"} for name, port in ports.items()}
    document = {
        "policy": str(policy),
        "state_dir": str(folder / "state"),
        "server": {"port": 0},
        "engine": {"enabled": False},
        "clouds": clouds,
        "log": "error",
    }
    (folder / "edge.yaml").write_text(json.dumps(document))
    command = [sys.executable, "-m", "causeway_server.edge_node", "serve", "--config", str(folder / "edge.yaml")]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(_START_S):
            line = await process.stdout.readline()
            while line and not line.startswith(b"ready url="):
                line = await process.stdout.readline()
        if not line:
            raise RuntimeError("the daemon ended before it was ready")
        yield line.partition(b"=")[2].decode().split()[0]
    finally:
        process.terminate()
        await process.wait()


async def stream(session: aiohttp.ClientSession, url: str, number: int) -> Sample:
    began, first, ended = time.monotonic(), float("inf"), False
    body = {"model": "large", "stream": True, "messages": [{"role": "user", "content": f"question {number}"}]}
    with contextlib.suppress(aiohttp.ClientError):
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            async for line in response.content:
                if line.startswith(b"data: {") and first == float("inf") and response.status == 200:
                    first = (time.monotonic() - began) * 1000.0
                ended = ended or line.startswith(b"data: [DONE]")
    return Sample(began, first, ended)


async def load(session: aiohttp.ClientSession, url: str, seconds: float, per_s: float) -> list[Sample]:
    """Begin streams at a fixed rate, and return them when all have ended."""
    started, running = time.monotonic(), []
    for number in range(int(seconds * per_s)):
        await asyncio.sleep(max(0.0, started + number / per_s - time.monotonic()))
        running.append(asyncio.ensure_future(stream(session, url, number)))
    return list(await asyncio.gather(*running))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=8.0, help="load of each stage, after the first 2 s")
    parser.add_argument("--rate", type=float, default=25.0, help="streams a second")
    parser.add_argument("--refuse", action="store_true", help="a cut cloud closes its connections")


async def main(options: argparse.Namespace) -> list[Row]:
    servers = {name: SlowCloud() for name in NAMES}
    networks: dict[str, Network] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, server in servers.items():
            await server.start()
            networks[name] = Network(server.port, refuses=options.refuse)
            await networks[name].start()
        ports = {name: network.port for name, network in networks.items()}
        async with (
            daemon(Path(folder), ports) as url,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
        ):
            rows = await measure(session, url, networks, options)
        for server in servers.values():
            await server.stop()
    return rows


async def measure(
    session: aiohttp.ClientSession, url: str, networks: dict[str, Network], options: argparse.Namespace
) -> list[Row]:
    """Put load on the device in each stage. Returns the rows."""
    await load(session, url, 2.0, options.rate)
    healthy = await load(session, url, options.seconds, options.rate)
    base_ms = quantile([one.ttft_ms for one in healthy], 0.99)
    lines, rows, unanswered = [["none", "all", *_figures(healthy)]], [], 0
    for stage in STAGES:
        for name, network in networks.items():
            if network.is_cut and name not in stage:
                await network.mend()
            elif name in stage and not network.is_cut:
                await network.cut()
        began = time.monotonic()
        found = await load(session, url, AFTER_S + options.seconds, options.rate)
        later = [one for one in found if one.began >= began + AFTER_S]
        unanswered += sum(not one.ended for one in found)
        words = "+".join(stage) or "none again"
        lines += [[words, "first 2 s", *_figures(found[: len(found) - len(later)])], [words, "after", *_figures(later)]]
        ratio = quantile([one.ttft_ms for one in later], 0.99) / base_ms
        change = f"the cut of {words}" if stage else "the end of all cuts"
        after = f"streams that begin at least 2 s after {change}"
        what = f"p99 of the time to the first token of {after}, divided by the p99 before the cuts"
        rows.append(Row(what, ratio, "x", MAX_SLOWDOWN))
    print(table(("cut", "when", "streams", "p50 ms", "p99 ms", "max ms", "not ended"), lines))
    return [*rows, Row("streams without an answer", unanswered, "", 0.0)]


def _figures(samples: list[Sample]) -> list[str]:
    times = [one.ttft_ms for one in samples]
    figures = (quantile(times, 0.5), quantile(times, 0.99), max(times))
    return [str(len(samples)), *(f"{each:.1f}" for each in figures), str(sum(not one.ended for one in samples))]
