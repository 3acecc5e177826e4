"""Two regions, each with a gateway and a server, and a device; requests bound to one region, under cuts and faults.

    device ──> gateway eu ──> server eu
       └─────> gateway us ──> server us         each gateway has the other region's server as its fallback tier

Each way is a socket of the bed, which counts the bytes of its requests, apart from those of probes, which have no
content, and can be cut. The device's policy lists the cloud `us` first. Requests come through the device (whole,
streamed, naming the target, as vectors and as jobs) and straight to both gateways, with faults of the server `eu` and
with the ways cut, one after the other, in rounds; each stage begins when the one before is healed, and so meets closed
breakers. At the end the same requests without a binding show that the ways into `us` are open and counted.

    python -m tests.bench residency                    10,000 bound requests
    python -m tests.bench residency --requests 1000 --rounds 1
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import aiohttp

from tests.bench.rows import Row
from tests.edge_node.scripted import Fault, ScriptedCloud

from .clouds import Network
from .figures import table

POLICY = """
version: 1
name: bed
targets:
  large: {at: [cloud:us, cloud:eu], model: assistant, first_token_timeout: 400ms, timeout: 800ms,
          can: [chat, completion, embedding, tools, json, logprobs]}
constraints: [{name: home, keep: in_region, regions: [eu], when: '"resident" in request.tags'}]
routes: [{name: all, use: [large]}]
limits: {concurrent: 2000, queue: 2000}
"""
BOUND = {"device": "resident", "gateway": "in-region:eu"}
_START_S = 120.0
_AT_ONCE = 12
_DEADLINE_MS = "1500"
_JOBS_S = 90.0


class Stage(NamedTuple):
    """A part of the load: what the server `eu` does, and which ways are cut."""

    fault: Fault = "none"
    cut: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        faults = () if self.cut and self.fault == "none" else (self.fault,)
        return ", ".join((*faults, *(f"cut {name}" for name in self.cut)))


STAGES = (
    Stage(),
    Stage("refuse"),
    Stage("die"),
    Stage("corrupt"),
    Stage("stall"),
    Stage(cut=("device-eu",)),
    Stage(cut=("eu-eu",)),
    Stage(cut=("eu-us", "us-eu")),
    Stage("refuse", cut=("device-eu", "us-eu")),
    Stage(),
)
# A request by its kind: where it is sent, its path, its model, whether it is streamed.
KINDS = (
    ("device", "chat/completions", "auto", False),
    ("device", "chat/completions", "auto", True),
    ("device", "chat/completions", "large", True),
    ("device", "chat/completions", "large@us", False),
    ("device", "embeddings", "large", False),
    ("device", "jobs", "auto", False),
    ("eu", "chat/completions", "assistant", True),
    ("eu", "chat/completions", "other", False),
    ("eu", "embeddings", "other", False),
    ("us", "chat/completions", "assistant", True),
)


class CountedWay(Network):
    """A way that counts the bytes of its requests, and those of probes (`GET`) apart."""

    def __init__(self, port: int) -> None:
        super().__init__(port, refuses=False)
        self.requests = self.probes = 0

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if writer.get_extra_info("peername")[1] != self._upstream:  # answers
            return await super()._carry(reader, writer)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lines = head.lower().split(b"\r\n")
                size = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), 0)
                body = await reader.readexactly(size) if size else b""
                if head.startswith(b"GET /") and b"/jobs" not in lines[0]:
                    self.probes += len(head) + size
                else:
                    self.requests += len(head) + size
                if not self.is_cut:
                    writer.write(head + body)
        if not self.is_cut:
            writer.close()
        return None


@contextlib.asynccontextmanager
async def process(module: str, *command: str) -> AsyncIterator[str]:
    """A command of ours in a process; yields its URL."""
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *command, stdout=asyncio.subprocess.PIPE
    )
    assert started.stdout is not None
    try:
        line = b""
        async with asyncio.timeout(_START_S):
            while not line.startswith(b"ready url="):
                line = await started.stdout.readline()
                if not line:
                    raise RuntimeError(f"{module} ended before it was ready")
        yield line.partition(b"=")[2].decode().split()[0]
    finally:
        started.terminate()
        await started.wait()


def gateway_config(folder: Path, region: str, ways: Mapping[str, CountedWay]) -> str:
    """Write the configuration of a gateway: its own tier, then the other region's. Returns the path."""
    other = {"eu": "us", "us": "eu"}[region]
    tiers = [
        {
            "name": name,
            "model": "m",
            "can": ["chat", "completion", "embedding"],
            "region": place,
            "ttft_objective_s": 0.3,
            "upstream": {
                "kind": "openai",
                "urls": [f"http://127.0.0.1:{ways[f'{region}-{place}'].port}/v1"],
                "verify_features": False,
            },
        }
        for name, place in (("assistant", region), ("other", other))
    ]
    document = {
        "server": {"port": 0},
        "operator": {"port": 0},
        "state_dir": str(folder / f"state-{region}"),
        "identity": {"region": region},
        "degradation": {"tiers": ["assistant", "other"], "warm_up_after_idle_s": 0},
        "tiers": tiers,
        "log": "error",
    }
    path = folder / f"gateway-{region}.yaml"
    path.write_text(json.dumps(document))
    return str(path)


def device_config(folder: Path, ways: Mapping[str, CountedWay]) -> str:
    policy = folder / "policy.yaml"
    policy.write_text(POLICY)
    clouds = {
        name: {"url": f"http://127.0.0.1:{ways[f'device-{name}'].port}/v1", "region": name} for name in ("us", "eu")
    }
    document = {
        "policy": str(policy),
        "state_dir": str(folder / "device"),
        "server": {"port": 0},
        "engine": {"enabled": False},
        "clouds": clouds,
        "jobs": {"jitter_s": 0, "cloud_rate_per_s": 1000, "default_deadline_s": "30s"},
        "log": "error",
    }
    path = folder / "edge.yaml"
    path.write_text(json.dumps(document))
    return str(path)


class Bed(NamedTuple):
    urls: Mapping[str, str]  # of the device and the gateways
    servers: Mapping[str, ScriptedCloud]
    ways: Mapping[str, CountedWay]

    @property
    def elsewhere(self) -> int:
        """Bytes of requests on the ways into `us`, and from the gateway there."""
        return sum(way.requests for name, way in self.ways.items() if "us" in name)

    @property
    def at_home(self) -> int:
        return sum(way.requests for name, way in self.ways.items() if "us" not in name)

    async def enter(self, stage: Stage) -> None:
        self.servers["eu"].fault = stage.fault
        for name, way in self.ways.items():
            if way.is_cut and name not in stage.cut:
                await way.mend()
            elif name in stage.cut and not way.is_cut:
                await way.cut()


@contextlib.asynccontextmanager
async def running() -> AsyncIterator[Bed]:
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = {name: await ScriptedCloud().start() for name in ("eu", "us")}
        ways: dict[str, CountedWay] = {}
        for server in servers.values():
            stack.push_async_callback(server.stop)

        async def open_way(name: str, port: int) -> None:
            ways[name] = CountedWay(port)
            await ways[name].start()
            stack.push_async_callback(ways[name].stop)

        urls = {}
        for name in ("eu-eu", "eu-us", "us-us", "us-eu"):
            await open_way(name, servers[name[3:]].port)
        for region in ("eu", "us"):
            command = ("serve", "--config", gateway_config(folder, region, ways))
            urls[region] = await stack.enter_async_context(process("causeway_server.cloud_pool", *command))
            await open_way(f"device-{region}", int(urls[region].rsplit(":", 1)[1].partition("/")[0]))
        command = ("serve", "--config", device_config(folder, ways))
        url = await stack.enter_async_context(process("causeway_server.edge_node", *command))
        yield Bed({**urls, "device": f"{url}/v1"}, servers, ways)


async def ask(session: aiohttp.ClientSession, bed: Bed, number: int, *, bound: bool) -> str:
    """Send a request of the kind of its number; return the status, with the code of an error."""
    place, path, model, stream = KINDS[number % len(KINDS)]
    tags = BOUND["device" if place == "device" else "gateway"] if bound else ""
    headers = {"x-causeway-deadline-ms": _DEADLINE_MS} | ({"x-causeway-tags": tags} if tags else {})
    text = f"question {number} of a resident"
    body: dict[str, object] = {"model": model, "input": text}
    if path != "embeddings":
        body = {"model": model, "stream": stream, "messages": [{"role": "user", "content": text}]}
    if path == "jobs":
        del headers["x-causeway-deadline-ms"], body["stream"]
    try:
        async with session.post(f"{bed.urls[place]}/{path}", json=body, headers=headers) as response:
            answer = await response.read()
            code = "" if response.status < 400 else json.loads(answer)["error"]["code"]
            return f"{place} {response.status} {code}".strip()
    except aiohttp.ClientError as error:
        return f"{place} {type(error).__name__}"


async def load(bed: Bed, first: int, count: int, *, bound: bool = True) -> Counter[str]:
    """Send `count` requests, some at once; return how they ended."""
    numbers, ended = iter(range(first, first + count)), Counter[str]()

    async def work(session: aiohttp.ClientSession) -> None:
        for number in numbers:
            ended[await ask(session, bed, number, bound=bound)] += 1

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(work(session) for _ in range(_AT_ONCE)))
    return ended


async def jobs_left(bed: Bed) -> int:
    """Wait until each accepted job of the device has ended, at most `_JOBS_S`; return how many have not."""
    left = 0.0
    async with aiohttp.ClientSession() as session:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_JOBS_S):
                while True:
                    async with session.get(bed.urls["device"].removesuffix("/v1") + "/metrics") as response:
                        counts = [line.rsplit(" ", 1) for line in (await response.text()).splitlines()]
                    accepted, ended = (
                        sum(float(count[-1]) for count in counts if count[0].startswith(f"causeway_edge_jobs_{what}"))
                        for what in ("accepted_total", "ended_total")
                    )
                    left = accepted - ended
                    if accepted and not left:
                        break
                    await asyncio.sleep(0.2)
    return int(left)


async def healed(bed: Bed) -> None:
    """Heal everything, and wait until the device and the gateway at home answer bound requests again."""
    await bed.enter(Stage())
    async with aiohttp.ClientSession() as session, asyncio.timeout(_START_S):
        for number in (0, 6):
            while not (await ask(session, bed, number, bound=True)).endswith(" 200"):
                await asyncio.sleep(0.1)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=10_000, help="bound requests in all stages together")
    parser.add_argument("--rounds", type=int, default=5, help="how often each stage comes")


async def main(options: argparse.Namespace) -> list[Row]:
    async with running() as bed:
        return await measure(bed, options.requests, STAGES * options.rounds)


async def measure(bed: Bed, requests: int, stages: Sequence[Stage] = STAGES) -> list[Row]:
    """Put the load on the bed, stage by stage. Returns the rows."""
    each, total = requests // len(stages), Counter[str]()
    sums = {stage: Counter[str]() for stage in stages}
    for at, stage in enumerate(stages):
        await healed(bed)
        before = bed.elsewhere, bed.at_home
        await bed.enter(stage)
        ended = await load(bed, at * each, each)
        total += ended
        sums[stage] += Counter(
            {
                "requests": each,
                "answered": sum(count for how, count in ended.items() if " 20" in how),
                "outside_region": sum(count for how, count in ended.items() if "outside_region" in how),
                "bytes in eu": bed.at_home - before[1],
                "bytes in us": bed.elsewhere - before[0],
            }
        )
    await healed(bed)
    left, elsewhere = await jobs_left(bed), bed.elsewhere
    await load(bed, 0, 10 * len(KINDS), bound=False)
    columns = ("requests", "answered", "outside_region", "bytes in eu", "bytes in us")
    lines = [[stage.words, *(str(found[name]) for name in columns)] for stage, found in sums.items()]
    print(table(("stage", *columns), lines))
    print(textwrap.fill("; ".join(f"{how}: {count}" for how, count in sorted(total.items())), 110))
    print("probes of the ways: " + ", ".join(f"{name} {way.probes}" for name, way in bed.ways.items()) + " bytes")
    return [
        Row("requests that were bound to eu", sum(total.values()), "", each * len(stages), better="higher"),
        Row("bytes of requests bound to eu that reached us", elsewhere, "B", 0.0),
        Row("bytes of requests bound to eu that reached eu", bed.at_home, "B", 1.0, better="higher"),
        Row(
            "bytes of 100 requests bound to no region that reached us",
            bed.elsewhere - elsewhere,
            "B",
            1.0,
            better="higher",
        ),
        Row("jobs that did not end", left, "", 0.0),
    ]
