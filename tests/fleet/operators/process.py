"""A control plane as a process, which can be killed, and an operator's commands against it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from click.testing import CliRunner, Result

from causeway_server.fleet.cli.commands import main
from tests.fleet.trust.signed_fleet import SignedFleet
from tests.ports import free_port
from tests.terminal import at_terminal


class Process:
    """`causeway-fleet serve` as a process, and commands of an operator against it."""

    def __init__(self, signed: SignedFleet) -> None:
        self.signed = signed
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""
        self.start()

    def start(self) -> None:
        folder, log = self.signed.path, self.signed.path.parent / "serve.log"
        arguments = ["serve", str(folder), "--keys", str(folder / "keys"), "--state-dir", str(folder / "data")]
        arguments += ["--listen", f"127.0.0.1:{self._port}"]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "causeway_server.fleet", *arguments], stdout=output, stderr=output
            )
        found = until(lambda: re.search(r"ready url=(http://\S+)", log.read_text()))
        self.url = found[1]

    def kill(self, number: int = signal.SIGKILL) -> None:
        assert self._process is not None
        self._process.send_signal(number)
        self._process.wait(120)

    def run(self, *arguments: str, as_: str = "april") -> Result:
        env = {**os.environ, "CAUSEWAY_FLEET_URL": self.url, "CAUSEWAY_FLEET_TOKEN": as_}
        return CliRunner().invoke(main, list(arguments), env=env)

    def at_terminal(self, *arguments: str, keys: str, as_: str = "april") -> tuple[int, str]:
        """Run a command at a terminal where `keys` are typed; return its exit code and output."""
        env = {**os.environ, "CAUSEWAY_FLEET_URL": self.url, "CAUSEWAY_FLEET_TOKEN": as_}
        return at_terminal([sys.executable, "-m", "causeway_server.fleet", *arguments], keys, env)

    def done(self, *arguments: str, as_: str = "april") -> str:
        result = self.run(*arguments, as_=as_)
        assert result.exit_code == 0, result.output
        return result.output


def until(find: Callable[[], re.Match[str] | None]) -> re.Match[str]:
    deadline = time.monotonic() + 200  # only a hung test reaches it
    while True:
        found = find()
        if found:
            return found
        assert time.monotonic() < deadline
        time.sleep(0.05)
