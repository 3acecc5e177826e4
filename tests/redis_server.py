"""A real redis-server for tests: its own port and folder, every write on disk before it is acknowledged.

from tests.redis_server import RedisServer, redis_server   # in a conftest: the fixture, once per session
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from .ports import free_port
from .server_process import ServerProcess

PATIENCE_S = 60.0


class RedisServer(ServerProcess):
    """Started at once. `kill` is -9; `start` after it finds the same data under the same port."""

    def __init__(self, folder: Path, *settings: str) -> None:
        super().__init__()
        self._folder = folder
        self._settings = settings
        self.port = free_port()
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def listen(self) -> tuple[str, ...]:
        """The settings of its port."""
        return ("--port", str(self.port))

    def client(self, **more: Any) -> redis.Redis:
        """Return a client of this very server."""
        if "--requirepass" in self._settings:
            more = {"password": self._settings[self._settings.index("--requirepass") + 1]} | more
        return redis.Redis(host="127.0.0.1", port=self.port, **more)

    def start(self, *settings: str) -> None:
        """Start it; `settings` hold beside its own for this start."""
        assert self._process is None, "it runs"
        durable = ("--appendonly", "yes", "--appendfsync", "always", "--save", "")
        place = (*self.listen, "--bind", "127.0.0.1", "--dir", str(self._folder))
        more = (*durable, "--loglevel", "warning", *self._settings, *settings)
        self._process = subprocess.Popen(["redis-server", *place, *more], stdout=subprocess.DEVNULL)
        self._wait()

    def flush(self) -> None:
        with self.client() as client:
            client.flushall()

    def _wait(self) -> None:
        ends = time.monotonic() + PATIENCE_S
        while True:
            try:
                with self.client() as client:
                    client.ping()
                return
            except redis.AuthenticationError:  # it answers
                return
            except redis.RedisError:  # refused, or still loading
                assert time.monotonic() < ends, "redis-server does not answer"
                assert self._process is not None
                assert self._process.poll() is None, "redis-server ended"
                time.sleep(0.02)


def unreachable_redis() -> redis.asyncio.Redis:
    """A client of a port where nothing listens; each command fails at once."""
    return redis.asyncio.Redis(host="127.0.0.1", port=1, retry=Retry(NoBackoff(), 0))


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server here")
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    try:
        yield server
    finally:
        server.kill()
