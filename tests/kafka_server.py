"""A broker of Kafka's protocol for tests: its own port and process; see tests.kafka_cluster for what it is.

from tests.kafka_server import KafkaServer, kafka_server   # in a conftest: the fixture, once per session
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = ("aiokafka", "confluent_kafka")


class KafkaServer:
    """Started at once. `kill` breaks connections and stops listening; `start` finds the same data at the same port.

    Args:
        tls: Files for TLS: certificate, key, the clients' CA; none: no TLS.
    """

    def __init__(self, *tls: Path) -> None:
        command = [sys.executable, "-m", "tests.kafka_cluster", *map(str, tls)]
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nowhere, text=True, cwd=ROOT)
        line = self._read()
        assert line.isdigit(), "the cluster did not start"
        self.port = int(line)

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def topic(self, name: str) -> str:
        """Return the address of a topic."""
        return f"kafka://{self.host}/{name}"

    def create_topic(self, name: str, partitions: int = 1) -> None:
        self._command(f"topic {name} {partitions}")

    def kill(self) -> None:
        self._command("down")

    def start(self) -> None:
        self._command("up")

    def set_full(self, full: bool) -> None:
        """Store nothing more, as with a full disk, or store again."""
        self._command("full" if full else "room")

    def pause(self) -> None:
        """Stop the process (SIGSTOP): connections stay open and nothing answers, as in a partition."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitpid(self._process.pid, os.WUNTRACED)  # until its last thread has stopped

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End the process; its data are gone."""
        self._process.kill()
        self._process.wait()

    def _command(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        assert self._read() == "done", "the cluster ended"

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@pytest.fixture(scope="session")
def kafka_server() -> Iterator[KafkaServer]:
    """Start one; skips where the packages are not installed (`make prepare-test` installs them)."""
    missing = [name for name in MODULES if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (pip install 'causeway-router[kafka,dev]')")
    server = KafkaServer()
    try:
        yield server
    finally:
        server.close()
