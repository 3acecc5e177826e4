"""`python -m tests.bed.rotation [--seconds 30] [--rate 200]`: certificates replaced under load.

A gateway with mTLS and a scripted service in place of a Triton answers clients of our own, half of them on kept
connections, half on a new one each. Meanwhile the certificates of both sides are replaced again and again: the
certificate first and its key after it, as a careless script does, so that for a moment they do not fit. Each request
must be answered.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import msgspec

from causeway_server.cloud_pool.accounts.identity.config import CertificateIdentityConfig, IdentityConfig
from causeway_server.cloud_pool.config import Config
from causeway_server.cloud_pool.http.config import ServerConfig
from causeway_server.router.config import ListenerTls
from causeway_server.router.serving.http_client import HttpClient, HttpClientError, field_lines
from causeway_server.router.serving.tls.contexts import TlsContext, TlsFiles, client_tls
from tests.certificates import Authority
from tests.cloud_pool.accounts.identity.gateway import ASK, running
from tests.cloud_pool.unreachable import unreachable_tier
from tests.tool import run_tool

_BODY = msgspec.json.encode(ASK)
_LINES = field_lines({"Content-Type": "application/json"})
_TIMEOUT_S = 20.0


class Rotation(msgspec.Struct):
    """What happened. `failed`: requests by fault; `serials`: the server's certificates that new connections met."""

    answered: int = 0
    failed: Counter[str] = msgspec.field(default_factory=Counter)
    replaced: int = 0
    serials: set[int] = msgspec.field(default_factory=set)


class Site:
    """A gateway, and what its clients need."""

    def __init__(self, folder: Path, url: str, context: TlsContext, ca: Authority) -> None:
        self._folder = folder
        self._url = url
        self._context = context
        self._ca = ca
        self._kept = self._client(limit=16)
        self.seen = Rotation()

    async def ask(self, number: int) -> None:
        """Send a request: an even one on a kept connection, an odd one on a new one."""
        client = self._client(limit=1) if number % 2 else self._kept
        until = asyncio.get_running_loop().time() + _TIMEOUT_S
        try:
            response = await client.request("POST", "/v1/chat/completions", _LINES, until, _BODY)
            status = response.status
            response.release()
        except (HttpClientError, TimeoutError) as error:
            self.seen.failed[f"{type(error).__name__}: {error}"] += 1
        else:
            self.seen.answered += status == 200
            if status != 200:
                self.seen.failed[str(status)] += 1
        if client is not self._kept:
            client.close()

    async def replace(self) -> None:
        """Replace both certificates, each before its key, and look at the server's after a moment."""
        self.seen.replaced += 1
        for side in ("server", "client"):
            issued = self._ca.issue(f"{side}-{self.seen.replaced}", organization="acme")
            shutil.copy(issued.cert, self._folder / f"{side}.pem")
            await asyncio.sleep(0.02)
            shutil.copy(issued.key, self._folder / f"{side}.key")

    async def look(self) -> None:
        """Note the certificate that a new connection meets now."""
        host, port = self._url.removeprefix("https://").split(":")
        _, writer = await asyncio.open_connection(host, int(port), ssl=self._context)
        self.seen.serials.add(int(writer.get_extra_info("peercert")["serialNumber"], 16))
        writer.close()

    def close(self) -> None:
        self._kept.close()

    def _client(self, limit: int) -> HttpClient:
        return HttpClient(self._url, tls=self._context, limit=limit, connect_timeout_s=_TIMEOUT_S, idle_s=30.0)


@contextlib.asynccontextmanager
async def site(folder: Path) -> AsyncIterator[Site]:
    """Run a gateway with the first certificates."""
    ca = Authority(folder / "ca")
    for side in ("server", "client"):
        issued = ca.issue(f"{side}-0", organization="acme")
        shutil.copy(issued.cert, folder / f"{side}.pem")
        shutil.copy(issued.key, folder / f"{side}.key")
    config = Config(
        server=ServerConfig(tls=ListenerTls(str(folder / "server.pem"), str(folder / "server.key"), str(ca.file))),
        identity=IdentityConfig(certificates=CertificateIdentityConfig(tenants=("acme",))),
        tiers=(unreachable_tier("assistant-large"),),
    )
    files = TlsFiles(
        where="client", ca_file=str(ca.file), cert_file=str(folder / "client.pem"), key_file=str(folder / "client.key")
    )
    async with running(config) as gateway:
        made = Site(folder, gateway.url, client_tls(files), ca)
        try:
            yield made
        finally:
            made.close()


async def run(seconds: float, rate: float, every_s: float) -> Rotation:
    """Send `rate` requests a second, and replace the certificates every `every_s` seconds."""
    with tempfile.TemporaryDirectory() as folder:
        async with site(Path(folder)) as one, anyio.create_task_group() as tasks:
            began = asyncio.get_running_loop().time()
            replaced_at = began
            for number in range(int(seconds * rate)):
                due = began + number / rate
                await asyncio.sleep(due - asyncio.get_running_loop().time())
                tasks.start_soon(one.ask, number)
                if due - replaced_at >= every_s:
                    replaced_at = due
                    await one.look()
                    tasks.start_soon(one.replace)
        return one.seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--every", type=float, default=1.5, help="seconds between two replacements")
    options = parser.parse_args()
    seen = asyncio.run(run(options.seconds, options.rate, options.every))
    print(
        f"{seen.answered} answered, {sum(seen.failed.values())} failed {dict(seen.failed)}; "
        f"{seen.replaced} replacements, {len(seen.serials)} of the server's certificates seen"
    )
    if seen.failed:
        raise SystemExit(1)


if __name__ == "__main__":
    sys.exit(run_tool(main))
