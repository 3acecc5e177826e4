"""Programs that `up` starts beside itself: their log, the line that says they are ready, and their end.

Each runs in a session of its own, so that Ctrl-C reaches `up` alone, which then ends them in order; and the kernel
sends them SIGTERM should `up` itself be killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

READY = "ready "
_PR_SET_PDEATHSIG = 1
_TAIL_BYTES = 16 * 1024
_LINE_BYTES = 1 << 20


class ChildProcessEnded(Exception):
    """A child ended before it was ready, or was not ready in time. The message has its last words."""


class ChildProcess:
    """One program. `log` gets all that it prints; a line ``ready key=value …`` on its stdout says that it works."""

    def __init__(self, name: str, argv: Sequence[str], log: Path, environ: Mapping[str, str]) -> None:
        self.name = name
        self.log = log
        self._argv = list(argv)
        self._environ = dict(environ)
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()
        self._started = 0.0

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        self._started = time.monotonic()
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=self._environ,
                limit=_LINE_BYTES,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        self._reader = asyncio.create_task(self._read())

    async def ready(self, timeout_s: float) -> dict[str, str]:
        """The words of the ready line. Raises ChildEnded."""
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(self._ready)
        except TimeoutError:
            raise ChildProcessEnded(f"{self.name} was not ready within {timeout_s:g} s{self.last_words()}") from None

    @property
    def age_s(self) -> float:
        """Since its start."""
        return time.monotonic() - self._started

    @property
    def ended(self) -> bool:
        return self._process is not None and self._process.returncode is not None

    async def wait(self) -> int:
        """Its exit status, once it has ended."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self, grace_s: float) -> bool:
        """SIGTERM, then after `grace_s` SIGKILL for it and all that it started. Whether it ended by itself."""
        process = self._process
        if process is None:
            return True
        graceful = True
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                async with asyncio.timeout(grace_s):
                    await process.wait()
            except TimeoutError:
                graceful = False
                self.kill()
                await process.wait()
        if self._reader is not None:
            await self._reader
        return graceful

    def kill(self) -> None:
        """At once, with all that it started: its children may lead sessions of their own."""
        if self._process is None or self._process.returncode is not None:
            return
        with contextlib.suppress(psutil.Error):
            family = psutil.Process(self._process.pid).children(recursive=True)
            self._process.kill()
            for one in family:
                with contextlib.suppress(psutil.Error):
                    one.kill()

    def tail(self, lines: int = 12) -> list[str]:
        """The last lines of its log."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
                return list(deque(log.read().decode("utf-8", "replace").splitlines(), maxlen=lines))
        except OSError:
            return []

    async def _read(self) -> None:
        """Until its stdout closes: into the log, and the ready line to whoever waits for it."""
        assert self._process is not None
        assert self._process.stdout is not None
        with self.log.open("ab", buffering=0) as log:
            while True:
                try:
                    line = await self._process.stdout.readline()
                except ValueError:  # a line longer than the buffer, which is dropped
                    continue
                if not line:
                    break
                log.write(line)
                text = line.decode("utf-8", "replace").strip()
                if text.startswith(READY) and not self._ready.done():
                    self._ready.set_result(dict(_pairs(text.removeprefix(READY))))
        code = await self._process.wait()
        if not self._ready.done():
            self._ready.set_exception(ChildProcessEnded(f"{self.name} ended ({_told(code)}){self.last_words()}"))
            self._ready.exception()  # whoever waits is told; when nobody does, that is no fault

    def last_words(self) -> str:
        """The end of its log, indented, to be put behind what happened."""
        tail = self.tail()
        return ":\n" + "\n".join(f"    {line}" for line in tail) if tail else ""


def _pairs(text: str) -> list[tuple[str, str]]:
    return [(key, value) for word in text.split() for key, found, value in [word.partition("=")] if found]


def _told(code: int) -> str:
    return f"status {code}" if code >= 0 else signal.Signals(-code).name


def _end_with_parent() -> None:
    """In the child before exec: SIGTERM when `up` dies, even by kill -9 (Linux, prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
