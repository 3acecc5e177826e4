"""`python -m tests.bench fleet-polls`: one control plane, 15,000 parked polls, a change that wakes 5,000 of them.

Every device has its identity and its token; a third of them are of the cohort that changes. The change is committed by
another process, as an operator's command would. Prints the server's memory before and after, and how long after the
commit each device had its answer; exits 1 beyond the limits.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from typing import cast

import psutil
import uvloop

from causeway_server.fleet.server.tokens import TokenKey, load_token_key
from causeway_server.fleet.store.database import Store
from causeway_server.fleet.store.generations import advance
from causeway_server.router.serving.addresses import raise_file_limit
from tests.bench.fleet import plane
from tests.bench.fleet.devices import device_name
from tests.bench.rows import Row

COHORT = "others"  # every third device: see tests.bench.fleet.server
MOST_MB, MOST_S = 250.0, 3.0
AT_ONCE = 200  # connections that are being made


class _Poll(asyncio.Protocol):
    """One poll after the other; `answered` holds when each answer to a parked poll arrived."""

    def __init__(self, token: str) -> None:
        self._head = f"Host: fleet\r\nAuthorization: Bearer {token}\r\n"
        self._transport: asyncio.Transport | None = None
        self.first: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.answered: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(f"GET /v1/wake?wait=0 HTTP/1.1\r\n{self._head}\r\n".encode())

    def park(self, etag: str) -> None:
        assert self._transport is not None
        head = f"{self._head}If-None-Match: {etag}\r\n"
        self._transport.write(f"GET /v1/wake?wait=300 HTTP/1.1\r\n{head}\r\n".encode())

    def data_received(self, data: bytes) -> None:
        if not self.first.done():
            etag = data.decode().lower().partition("\r\netag: ")[2].partition("\r\n")[0]
            self.first.set_result(etag)
        elif not self.answered.done():
            self.answered.set_result(time.monotonic())


async def measure(folder: Path, count: int) -> list[Row]:
    database = f"sqlite:///{folder / 'fleet.db'}"
    with plane(folder / "fleet", database, count) as (port, pid):
        server = psutil.Process(pid)
        empty_mb = server.memory_info().rss / 1e6
        key = load_token_key(folder / "fleet" / "data" / "token-key.jwk", "causeway")
        polls = await _parked(port, key, count)
        await asyncio.sleep(5.0)  # the last ones are parked, and the server is idle
        parked_mb = server.memory_info().rss / 1e6
        told = await _tell(database, polls[::3])
    p50, p99 = told[len(told) // 2], told[int(len(told) * 0.99)]
    return [
        Row("memory", parked_mb, "MB", MOST_MB, note=f"{count} parked polls; {empty_mb:.0f} MB without devices"),
        Row("told, p99", p99, "s", MOST_S, note=f"{len(told)} devices, p50 {p50:.2f} s, all {told[-1]:.2f} s"),
    ]


async def _parked(port: int, key: TokenKey, count: int) -> list[_Poll]:
    turns = asyncio.Semaphore(AT_ONCE)
    loop = asyncio.get_running_loop()

    async def connect(number: int) -> _Poll:
        async with turns:
            token = key.issue(device_name(number), "acme", time.time())
            _, poll = await loop.create_connection(lambda: _Poll(token), f"127.0.0.{1 + number % 4}", port)
            poll.park(await poll.first)
            return poll

    return await asyncio.gather(*map(connect, range(count)))


async def _tell(database: str, polls: list[_Poll]) -> list[float]:
    """Return how long after the commit each poll was answered, sorted."""
    store = await Store.open(database)
    began = time.monotonic()
    async with store.write() as connection:
        await advance(connection, COHORT)
    found = sorted(at - began for at in await asyncio.gather(*(poll.answered for poll in polls)))
    await store.close()
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--devices", type=int, default=15_000)


def main(options: argparse.Namespace) -> list[Row]:
    devices = options.devices
    raise_file_limit()
    with tempfile.TemporaryDirectory() as folder:
        return uvloop.run(measure(Path(folder), devices))
