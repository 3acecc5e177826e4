"""The process of a real server: killed, paused and resumed as a bad day does it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager


class ServerProcess:
    """`start` is the subclass's."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def kill(self) -> None:
        """End it by SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Stop the process (SIGSTOP): connections stay open and nothing answers, as in a partition."""
        assert self._process is not None, "it does not run"
        self._process.send_signal(signal.SIGSTOP)
        os.waitpid(self._process.pid, os.WUNTRACED)  # until its last thread has stopped

    def resume(self) -> None:
        assert self._process is not None, "it does not run"
        self._process.send_signal(signal.SIGCONT)

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.pause()
        try:
            yield
        finally:
            self.resume()
