"""A real nats-server with JetStream for tests: its own port and folder.

from tests.nats_server import NatsServer, nats_server   # in a conftest: the fixture, once per session
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .ports import free_port
from .server_process import ServerProcess

PATIENCE_S = 60.0


class NatsServer(ServerProcess):
    """Started at once. `kill` is -9; `start` after it finds the same data under the same port."""

    def __init__(self, folder: Path, *settings: str) -> None:
        super().__init__()
        self._folder = folder
        self._settings = settings
        self.port = free_port()
        self.start()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def topic(self, subject: str) -> str:
        """Return the address of a subject."""
        return f"nats://{self.host}/{subject}"

    def start(self) -> None:
        assert self._process is None, "it runs"
        config = self._folder / "nats.conf"
        config.write_text(
            f"host: 127.0.0.1\nport: {self.port}\n"
            f"jetstream {{ store_dir: '{self._folder}', max_file: 1Gb, max_mem: 64Mb }}\n" + "\n".join(self._settings)
        )
        command = ["nats-server", "--config", str(config)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        ends = time.monotonic() + PATIENCE_S
        while True:
            try:
                with socket.create_connection(("127.0.0.1", self.port), 1.0) as client:
                    assert client.recv(5) == b"INFO "
                return
            except OSError:
                assert time.monotonic() < ends, "nats-server does not answer"
                assert self._process.poll() is None, "nats-server ended"
                time.sleep(0.02)


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """Start one, or skip if $CAUSEWAY_SKIP names nats; without it, a missing nats-server is a failure."""
    if "nats" in os.environ.get("CAUSEWAY_SKIP", "").replace(",", " ").split():
        pytest.skip("CAUSEWAY_SKIP names nats")
    assert shutil.which("nats-server") is not None, "nats-server is not installed: apt-get install nats-server"
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    try:
        yield server
    finally:
        server.kill()
