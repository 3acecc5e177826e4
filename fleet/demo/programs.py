"""The programs of the demo as child processes: the control plane and the boxes, as their users start them."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

READY_S = 120.0
STOP_S = 30.0
CAUSEWAY_FLEET = (sys.executable, "-m", "fleet")
CAUSEWAY_EDGE = (sys.executable, "-m", "edge_node")


class ProgramFailed(Exception):
    """A program ended, or did not become ready; the message holds the end of its log."""


class Program:
    """A program with a log file of its own, which prints a line that begins with `ready `."""

    def __init__(self, name: str, command: list[str], log: Path) -> None:
        self.name = name
        self._log = log
        self._lines: queue.Queue[str] = queue.Queue()
        with log.open("wb") as file:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True)
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ready(self) -> dict[str, str]:
        """Return the fields of the ready line.

        Raises:
            ProgramFailed: It ended before, or took too long.
        """
        while True:
            try:
                line = self._lines.get(timeout=READY_S)
            except queue.Empty:
                raise self._failed(f"not ready after {READY_S:.0f} s") from None
            if line == "":
                raise self._failed("ended before it was ready")
            if line.startswith("ready "):
                return dict(field.split("=", 1) for field in line.split()[1:])

    def stop(self) -> None:
        """Send SIGTERM and wait; then kill."""
        self._process.terminate()

    def wait(self) -> None:
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _failed(self, what: str) -> ProgramFailed:
        log = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-10:]
        return ProgramFailed("\n".join([f"{self.name}: {what}; the end of {self._log}:", *log]))


def run_command(*arguments: str, cwd: Path | None = None, environ: Mapping[str, str] | None = None) -> str:
    """Run a command to its end and return its standard output.

    Raises:
        ProgramFailed: It ended with another status than 0; the message holds its output.
    """
    done = subprocess.run(
        list(arguments),
        cwd=cwd,
        env={**os.environ, **(environ or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise ProgramFailed(f"{' '.join(arguments[2:6])} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout
