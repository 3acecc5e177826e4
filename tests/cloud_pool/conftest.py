"""A real Triton under its launcher and a real gateway, started once through the command line."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from urllib.request import urlopen

import aiohttp
import psutil
import pytest
import pytest_asyncio

from tests.redis_server import redis_server as redis_server  # a fixture

ROOT = Path(__file__).parents[2]
TOKEN = "kiosk-secret"
PATIENCE_S = 60.0

CONFIG = """
server: {port: 0, token_file: tokens, readiness_cache_s: 0, max_body_bytes: 200000}
tiers:
  - {name: assistant-large, aliases: [large]}
  - {name: tight, model: assistant-large, artifact: assistant-large, concurrency: 1, max_queued: 0}
  - {name: absent, model: not-loaded, artifact: assistant-large}
"""


class Command:
    """A command of ours, which prints `ready …` on stdout each time it is ready."""

    def __init__(self, *args: str, **environ: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "causeway_server.cloud_pool", *args],
            cwd=ROOT,
            env={**os.environ, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log: list[str] = []
        self._lines: queue.Queue[str] = queue.Queue()
        for stream, add in ((self.process.stdout, self._lines.put), (self.process.stderr, self.log.append)):
            threading.Thread(target=self._read, args=(stream, add), daemon=True).start()

    def ready(self) -> dict[str, str]:
        """Return the next ready line's fields."""
        try:
            line = self._lines.get(timeout=PATIENCE_S)
        except queue.Empty:
            raise AssertionError("not ready:\n" + "\n".join(self.log)) from None
        assert line.startswith("ready "), line
        return dict(field.split("=", 1) for field in line.split()[1:])

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(timeout=PATIENCE_S)

    def stop_triton(self) -> None:
        """Stop a launcher whose Triton is killed, because by itself that takes two seconds to end."""
        servers = psutil.Process(self.process.pid).children() if self.process.poll() is None else []
        self.process.terminate()
        for server in servers:
            with contextlib.suppress(psutil.NoSuchProcess):
                server.kill()
        self.process.wait(timeout=PATIENCE_S)

    def _read(self, stream: Iterator[str], add: Callable[[str], None]) -> None:
        for line in stream:
            add(line.rstrip("\n"))


class Pool:
    """The launcher and the Triton below it."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self.grpc = self.metrics = ""
        self.wait_ready()

    def wait_ready(self) -> None:
        fields = self.command.ready()
        self.grpc, self.metrics = fields["grpc"], fields["metrics"]

    @property
    def server(self) -> psutil.Process:
        (found,) = psutil.Process(self.command.process.pid).children()
        return found

    @property
    def stub(self) -> psutil.Process:
        """The model's process; Triton does not reap stubs that died before."""
        (found,) = (one for one in self.server.children() if one.status() != psutil.STATUS_ZOMBIE)
        return found

    def gauge(self, name: str) -> float:
        """Read one of the engine's figures from Triton's metrics."""
        text = urlopen(f"http://{self.metrics}/metrics").read().decode()
        found = re.search(rf"^causeway_engine_{name}{{.*}} (\S+)$", text, re.MULTILINE)
        assert found is not None, text
        return float(found[1])

    def is_idle(self) -> bool:
        return self.gauge("running") == 0.0 and self.gauge("waiting") == 0.0


@pytest.fixture(scope="session")
def triton_environment() -> Path:
    path = Path(os.environ.get("CAUSEWAY_TRITON_ENV", ROOT / ".venv-triton"))
    if not (path / "triton.json").is_file():
        pytest.skip(f"no Triton environment at {path}: `make setup` makes it")
    return path


@pytest.fixture(scope="session")
def pool(triton_environment: Path) -> Iterator[Pool]:
    ports = ("--grpc-port", "0", "--metrics-port", "0")
    # A short drain: requests that a killed model process left behind never end.
    limits = ("--threads", "1", "--drain-s", "1")
    command = Command("triton", *ports, *limits, CAUSEWAY_TRITON_ENV=str(triton_environment))
    try:
        yield Pool(command)
    finally:
        command.stop_triton()


@pytest.fixture(scope="session")
def addresses(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The gateway's ready line. Its `absent` tier names a model that Triton has not loaded."""
    folder = tmp_path_factory.mktemp("gateway")
    (folder / "tokens").write_text(f"kiosk {TOKEN}\n")
    (folder / "gateway.yaml").write_text(CONFIG)
    command = Command("serve", "--config", str(folder / "gateway.yaml"), "--triton", pool.grpc)
    try:
        yield command.ready()
        assert command.stop() == 0
    finally:
        command.process.kill()


@pytest.fixture(scope="session")
def gateway(addresses: dict[str, str]) -> str:
    """The gateway's URL, ending in /v1."""
    return addresses["url"]


@pytest.fixture(scope="session")
def operator(addresses: dict[str, str]) -> str:
    """The URL of the gateway's operators."""
    return addresses["operator"]


@pytest_asyncio.fixture
async def http(gateway: str) -> AsyncIterator[aiohttp.ClientSession]:
    headers = {"authorization": f"Bearer {TOKEN}"}
    async with aiohttp.ClientSession(headers=headers, base_url=gateway.removesuffix("/v1")) as session:
        yield session
