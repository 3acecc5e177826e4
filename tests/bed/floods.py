"""`python -m tests.bench floods [--seconds 20]`: one tenant floods a gateway in every way that needs no GPU; another
one submits jobs beside it.

The gateway has a real Redis and no Triton. It has a core of its own where there are two, the clients have another, and
the flood runs in a process of its own at the lowest priority. The quiet tenant submits, reads and cancels a job ten
times a second, alone and then beside the flood, in turns. Its 99th percentile may be MAX_TIMES that alone, and none of
its requests is refused.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import msgspec

from causeway_server.cloud_pool.accounts.identity.issuing import issue
from tests.bench.rows import Row, checks
from tests.cloud_pool.accounts.identity.token_issuer import Issuer
from tests.redis_server import RedisServer

from .figures import print_figures, quantile, table

TEMPLATE = Path(__file__).parents[1] / "cloud_pool/plain.jinja"
MAX_TIMES = 1.5
_REDIS = ("--maxmemory-policy", "noeviction", "--appendfsync", "no")  # the disk is not what is measured
PER_S = 10.0
FLOOD_PER_S = 200.0  # of requests; connections that are held are opened as fast
JOB = {"model": "large", "messages": [{"role": "user", "content": "hello"}], "not_before_ms": 3_600_000}
CHAT = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n"
SLOW = CHAT + "Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{{"
LARGE = CHAT + "Content-Type: application/json\r\nContent-Length: 4000000\r\n\r\n{{"
SESSION = (
    "GET /v1/realtime?model=large HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nConnection: Upgrade\r\n"
    "Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


class Target(msgspec.Struct, frozen=True):
    """A gateway as one tenant sees it."""

    url: str
    grpc_port: int
    token: str

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def session(self) -> aiohttp.ClientSession:
        headers = {"authorization": f"Bearer {self.token}"}
        return aiohttp.ClientSession(self.url, headers=headers, connector=aiohttp.TCPConnector(limit=64))


async def paced(per_s: float, begin: Callable[[], Awaitable[object]]) -> None:
    """Begin work at a rate, whatever becomes of it, for ever."""
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Future[object]] = set()
    due = loop.time()
    while True:
        task = asyncio.ensure_future(begin())
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        due = max(due + 1.0 / per_s, loop.time() - 1.0)
        await asyncio.sleep(max(0.0, due - loop.time()))


# --- floods ----------------------------------------------------------------------------------------------------------


async def requests(target: Target, method: str, path: str, *, cancel: bool = False) -> None:
    async with target.session() as session:

        async def one() -> None:
            body = JOB if method == "POST" else None
            async with session.request(method, path, json=body) as answer:
                job = (await answer.json()).get("id") if cancel and answer.status == 202 else None
            if job:
                async with session.delete(f"/v1/jobs/{job}"):
                    pass

        await paced(FLOOD_PER_S, one)


async def held(port: int, sent: str) -> None:
    """Hold every connection until the other side ends it."""

    async def one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.closing(writer):
            writer.write(sent.encode())
            while await reader.read(65_536):
                pass

    await paced(FLOOD_PER_S, one)


async def event_streams(target: Target) -> None:
    async with target.session() as session, session.post("/v1/jobs", json=JOB) as answer:
        job = (await answer.json())["id"]
    head = f"GET /v1/jobs/{job}/events HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {target.token}\r\n\r\n"
    await held(target.port, head)


FLOODS: dict[str, Callable[[Target], Awaitable[None]]] = {
    "submit and cancel": lambda target: requests(target, "POST", "/v1/jobs", cancel=True),
    "lists of jobs": lambda target: requests(target, "GET", "/v1/jobs?limit=100"),
    "lists of files": lambda target: requests(target, "GET", "/v1/files?limit=1"),
    "event streams": event_streams,
    "slow bodies": lambda target: held(target.port, SLOW.format(token=target.token)),
    "large bodies": lambda target: held(target.port, LARGE.format(token=target.token)),
    "live sessions": lambda target: held(target.port, SESSION.format(token=target.token)),
    "idle connections": lambda target: held(target.port, ""),
    "idle connections to gRPC": lambda target: held(target.grpc_port, ""),
}


# --- the quiet tenant ------------------------------------------------------------------------------------------------


class Seen(msgspec.Struct):
    """What the quiet tenant saw."""

    seconds: list[float] = []
    refused: int = 0


async def observe(target: Target, seconds: float) -> Seen:
    """Submit, read and cancel a job again and again, and time the three together."""
    seen = Seen()

    async with target.session() as session:

        async def one() -> None:
            began = time.monotonic()
            async with session.post("/v1/jobs", json=JOB) as answer:
                job = (await answer.json()).get("id")
                status = answer.status
            for method in ("GET", "DELETE") if status == 202 else ():
                async with session.request(method, f"/v1/jobs/{job}") as answer:
                    status = max(status, answer.status)
            seen.refused += status >= 400
            seen.seconds.append(time.monotonic() - began)

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await paced(PER_S, one)
    return seen


@contextmanager
def flooding(name: str, target: Target) -> Iterator[None]:
    """Flood from a process of its own at the lowest priority."""
    told = ["--flood", name, "--url", target.url, "--grpc", str(target.grpc_port), "--token", target.token]
    process = subprocess.Popen([sys.executable, "-m", "tests.bench", "floods", *told])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def measure(quiet: Target, flood: Target, seconds: float, rounds: int) -> list[str]:
    """Measure each flood in turn with none, print the table, and return the failed checks."""
    rows: list[list[object]] = []
    failures: list[str] = []
    figures: dict[str, float] = {}
    for name in FLOODS:
        alone, beside = Seen(), Seen()
        for _ in range(rounds):
            for seen, scope in ((alone, contextlib.nullcontext()), (beside, flooding(name, flood))):
                with scope:
                    found = asyncio.run(observe(quiet, seconds))
                seen.seconds += found.seconds
                seen.refused += found.refused
        p99s = [1000.0 * quantile(seen.seconds, 0.99) for seen in (alone, beside)]
        times = figures[name] = p99s[1] / p99s[0]
        medians = [f"{1000.0 * quantile(seen.seconds, 0.5):.1f}" for seen in (alone, beside)]
        counts = [len(beside.seconds), beside.refused]
        rows.append([name, *medians, *(f"{each:.1f}" for each in p99s), f"{times:.2f}", *counts])
        if beside.refused:
            failures.append(f"{name}: {beside.refused} requests of the quiet tenant were refused")
        if times > MAX_TIMES:
            failures.append(f"{name}: the quiet tenant's p99 is {times:.2f} times that alone")
    heads = ("flood", "p50 ms alone", "beside it", "p99 ms alone", "beside it", "times", "requests", "refused")
    print(table(heads, rows))
    print_figures(figures)
    return failures


@contextmanager
def gateway(folder: Path) -> Iterator[tuple[Target, Target]]:
    """Run Redis and a gateway, which has the first core. Yields it as the quiet tenant and as the flood see it."""
    issuer, redis = Issuer(folder), RedisServer(folder, *_REDIS)
    config = folder / "gateway.yaml"
    config.write_text(
        "server: {port: 0}\noperator: {port: 0}\ngrpc: {port: 0}\nlog: error\n"
        f"tiers: [{{name: large, triton: '127.0.0.1:1', template_file: '{TEMPLATE}', context_tokens: 2048}}]\n"
        f"redis: {redis.url}\nidentity: {{key_file: {issuer.config.key_file}}}\n"
        "jobs: {durability: warn}\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "causeway_server.cloud_pool", "serve", "--config", str(config)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(process.pid, {cores[0]})
        os.sched_setaffinity(0, set(cores[1:2]) or set(cores))
        assert process.stdout is not None
        while not (line := process.stdout.readline()).startswith("ready "):
            assert line, "the gateway ended"
        ready = dict(field.split("=", 1) for field in line.split()[1:])
        url, grpc = ready["url"].removesuffix("/v1"), int(ready["grpc"].rpartition(":")[2])
        yield tuple(Target(url, grpc, _token(issuer, name)) for name in ("quiet", "flood"))  # type: ignore[misc]
    finally:
        process.terminate()
        process.wait()
        redis.kill()


def _token(issuer: Issuer, tenant: str) -> str:
    return issue(
        issuer.key,
        tenant=tenant,
        device="one",
        scopes=("chat", "jobs"),
        issuer="causeway",
        audience="causeway-cloud",
        now=time.time(),
        lifetime_s=7200.0,
    )[0]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=20.0, help="duration of each measurement")
    parser.add_argument("--rounds", type=int, default=2, help="pairs of a measurement alone and one beside a flood")
    for name in ("--flood", "--url", "--token"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    parser.add_argument("--grpc", type=int, default=0, help=argparse.SUPPRESS)


def main(arguments: argparse.Namespace) -> list[Row]:
    if arguments.flood:
        os.nice(19)
        asyncio.run(FLOODS[arguments.flood](Target(arguments.url, arguments.grpc, arguments.token)))  # type: ignore[arg-type]
        return []
    with tempfile.TemporaryDirectory(prefix="causeway-floods-") as folder, gateway(Path(folder)) as (quiet, flood):
        failures = measure(quiet, flood, arguments.seconds, arguments.rounds)
    return checks(failures)
