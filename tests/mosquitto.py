"""A real mosquitto for tests: its own port and folder.

from tests.mosquitto import Mosquitto, mosquitto   # in a conftest: the fixture, one broker per test
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.prepare.programs import MOSQUITTO

from .ports import free_port
from .server_process import ServerProcess

PATIENCE_S = 60.0


class Mosquitto(ServerProcess):
    """`start` after `kill` (which is -9) finds the same port, and no sessions. `settings` are lines of its file."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self.port = free_port()
        self.settings = ["allow_anonymous true"]

    def start(self) -> None:
        assert self._process is None, "it runs"
        program = MOSQUITTO.find()
        assert program is not None, "mosquitto is not installed: apt-get install mosquitto"
        config = self._folder / "mosquitto.conf"
        # As root it would become another account, which cannot read the folder.
        lines = [f"listener {self.port} 127.0.0.1", "user root", *self.settings]
        config.write_text("\n".join(lines) + "\n")
        with (self._folder / "mosquitto.log").open("ab") as log:
            self._process = subprocess.Popen([program, "-c", str(config)], stdout=log, stderr=log)
        ends = time.monotonic() + PATIENCE_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1.0).close()
                return
            except OSError:
                assert time.monotonic() < ends, "mosquitto does not answer"
                assert self._process.poll() is None, (self._folder / "mosquitto.log").read_text()
                time.sleep(0.01)


@pytest.fixture
def mosquitto(tmp_path: Path) -> Iterator[Mosquitto]:
    """A broker that is to be started, or skip if $CAUSEWAY_SKIP names mosquitto; a missing one is a failure."""
    if "mosquitto" in os.environ.get("CAUSEWAY_SKIP", "").replace(",", " ").split():
        pytest.skip("CAUSEWAY_SKIP names mosquitto")
    folder = tmp_path / "mosquitto"
    folder.mkdir()
    broker = Mosquitto(folder)
    try:
        yield broker
    finally:
        broker.kill()
