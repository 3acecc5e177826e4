"""A real Redis on a Unix socket that can be killed and restarted on the same files."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
from pathlib import Path

_PATIENCE_S = 60.0


class RedisServer:
    def __init__(self, folder: Path, *settings: str) -> None:
        self.folder = folder
        self.socket = folder / "r.sock"
        self._settings = settings
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def start(self) -> None:
        program = shutil.which("redis-server")
        assert program is not None
        command = [program, "--port", "0", "--unixsocket", str(self.socket), "--dir", str(self.folder), "--save", ""]
        command += ["--appendonly", "yes", "--appendfsync", "always", "--maxmemory-policy", "noeviction"]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen([*command, *self._settings], stdout=log, stderr=log)
        self._wait_until_ready()

    def kill(self) -> None:
        """kill -9."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def _wait_until_ready(self) -> None:
        """Wait until it takes commands, after loading its files."""
        ticks = threading.Event()
        for _ in range(int(_PATIENCE_S / 0.01)):
            try:
                with socket.socket(socket.AF_UNIX) as client:
                    client.settimeout(_PATIENCE_S)
                    client.connect(str(self.socket))
                    client.sendall(b"PING\r\n")
                    if client.recv(64).startswith(b"+PONG"):
                        return
            except OSError:
                pass
            ticks.wait(0.01)
        raise AssertionError((self.folder / "log").read_text())
