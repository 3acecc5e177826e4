"""A program that `up` runs: its log, its ready line, its readiness over HTTP, and its end.

Each program runs in a session of its own, so that Ctrl-C reaches only `up`, which then stops the programs in order. If
`up` is killed, the kernel sends SIGTERM to each of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import httpx
import psutil

from causeway_server.router.serving.process import end_with_parent

READY = "ready "
_TAIL_BYTES = 16 * 1024
_LINE_BYTES = 1 << 20
_POLL_S = 0.05
_REFUSAL_CHARS = 300


class ChildProcessEnded(Exception):
    """A program ended before it was ready, or was not ready in time. The message includes the end of its log."""


class ChildProcess:
    """A program that `up` runs."""

    def __init__(self, name: str, argv: Sequence[str], log: Path, environ: Mapping[str, str]) -> None:
        self.name = name
        self.log = log
        self._argv = list(argv)
        self._environ = dict(environ)
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._end: asyncio.Task[int] | None = None
        self._ready: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()
        self._started = 0.0

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Start the program. Raises ChildProcessEnded if the system refuses that."""
        self._started = time.monotonic()
        with self.log.open("ab") as log:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *self._argv,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=log,
                    env=self._environ,
                    limit=_LINE_BYTES,
                    start_new_session=True,
                    preexec_fn=end_with_parent,
                )
            except (OSError, ValueError) as error:
                raise ChildProcessEnded(f"{self.name} cannot be started: {error}") from error
        self._reader = asyncio.create_task(self._read())
        self._end = asyncio.create_task(self._watch())

    async def ready(self, timeout_s: float) -> dict[str, str]:
        """Return the pairs of the line ``ready key=value …`` on stdout. Raises ChildProcessEnded."""
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(self._ready)
        except TimeoutError:
            raise ChildProcessEnded(f"{self.name} was not ready within {timeout_s:g} s{self.log_excerpt()}") from None

    async def ready_at(
        self,
        url: str,
        timeout_s: float,
        *,
        accept: Callable[[dict[str, object]], bool] = lambda _: True,
        body: Mapping[str, object] | None = None,
    ) -> dict[str, object]:
        """Poll `url`, with `body` if there is one, until it answers 200 with a JSON object that `accept` takes; return
        that. Raises ChildProcessEnded if the program ended or refused the body, or after `timeout_s`.
        """
        method = "GET" if body is None else "POST"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), httpx.AsyncClient(trust_env=False, timeout=timeout_s) as client:
                while not self.ended:
                    with contextlib.suppress(httpx.HTTPError, ValueError):
                        response = await client.request(method, url, json=body)
                        if response.is_client_error:
                            raise ChildProcessEnded(f"{self.name} refuses {url}: {response.text[:_REFUSAL_CHARS]}")
                        document = response.json()
                        if response.status_code == 200 and isinstance(document, dict) and accept(document):
                            return document
                    await asyncio.sleep(_POLL_S)
        raise ChildProcessEnded(f"{self.name} does not become ready{self.log_excerpt()}")

    @property
    def uptime_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    @property
    def ended(self) -> bool:
        return self._process is not None and self._process.returncode is not None

    async def wait(self) -> int:
        """Wait for the end and return the exit status."""
        assert self._end is not None
        return await asyncio.shield(self._end)

    async def stop(self, grace_s: float) -> bool:
        """Send SIGTERM to the program and its descendants, after `grace_s` SIGKILL. Return whether SIGTERM sufficed."""
        process = self._process
        if process is None:
            return True
        graceful = True
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                async with asyncio.timeout(grace_s):
                    await self.wait()
            except TimeoutError:
                graceful = False
                self.kill()
        await self.wait()
        if self._reader is not None:
            await self._reader
        return graceful

    def kill(self) -> None:
        """Kill the program and its descendants at once; some of them lead sessions of their own."""
        if self._process is None or self._process.returncode is not None:
            return
        with contextlib.suppress(psutil.Error):
            descendants = psutil.Process(self._process.pid).children(recursive=True)
            self._process.kill()
            for descendant in descendants:
                with contextlib.suppress(psutil.Error):
                    descendant.kill()

    def log_excerpt(self, lines: int = 12) -> str:
        """Return the end of the log, indented, to append to an error message; "" without one."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
                tail = log.read().decode("utf-8", "replace").splitlines()[-lines:]
        except OSError:
            return ""
        return ":\n" + "\n".join(f"    {line}" for line in tail) if tail else ""

    async def _watch(self) -> int:
        """Wait for the end, then kill processes that the program left, such as the engine of a killed vLLM:
        `Process.wait` would wait for them, too, as they hold the program's stdout open.
        """
        assert self._process is not None
        while self._process.returncode is None:  # noqa: ASYNC110 - asyncio has no event for it
            await asyncio.sleep(_POLL_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.returncode

    async def _read(self) -> None:
        """Copy stdout to the log until it closes, and resolve the ready future."""
        assert self._process is not None
        assert self._process.stdout is not None
        with self.log.open("ab", buffering=0) as log:
            while True:
                try:
                    line = await self._process.stdout.readline()
                except ValueError:  # a line longer than the buffer is dropped
                    continue
                if not line:
                    break
                log.write(line)
                text = line.decode("utf-8", "replace").strip()
                if text.startswith(READY) and not self._ready.done():
                    self._ready.set_result(dict(word.split("=", 1) for word in text.split() if "=" in word))
        code = await self._process.wait()
        if not self._ready.done():
            how = f"status {code}" if code >= 0 else signal.Signals(-code).name
            self._ready.set_exception(ChildProcessEnded(f"{self.name} ended ({how}){self.log_excerpt()}"))
            self._ready.exception()  # marks it as retrieved: without a waiter the failure is not an error
