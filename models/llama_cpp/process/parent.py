"""The daemon's side of one engine child: start it, talk to it, notice its end. asyncio, any loop.

A child is never used again after it ended; who wants another one starts a new `EngineProcess`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from router.errors import EngineUnavailable

from ..protocol import Emission, EngineOptions, Job, ModelInfo, Prompt
from . import frames

_ROOT = Path(__file__).resolve().parents[3]
_COUNT_S = 2.0
_END_S = 2.0
_POLL_S = 0.005
# llama.cpp's threads that wait for work sleep instead of spinning: the core is the daemon's meanwhile.
_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "GGML_NO_BACKTRACE": "1", "PYTHONUNBUFFERED": "1"}


class EmissionSink(Protocol):
    """Who waits for the emissions of some jobs."""

    def put(self, emissions: list[Emission]) -> None:
        """What one step made for these jobs."""

    def lost(self, reason: str) -> None:
        """The child is gone, and these jobs with it."""


class EngineProcess:
    """One child, from `start` to its end; `ended` is done, with the reason, when it is gone."""

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._loop = asyncio.get_running_loop()
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.Transport | None = None
        self._reader = frames.from_child()
        self._sinks: dict[int, EmissionSink] = {}
        self._asked: dict[int, asyncio.Future[int]] = {}
        self._asks = itertools.count(1)
        self._failure = ""
        self.ready: asyncio.Future[ModelInfo] = self._loop.create_future()
        self.ended: asyncio.Future[str] = self._loop.create_future()
        self.waiting = 0  # jobs that wait in the child, as it last said
        self.tokens_per_s: float | None = None  # of one stream
        self.progress_at = self._loop.time()  # when it last made something, or began to have something to make
        self._steps_seen = -1
        self._leaving: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def alive(self) -> bool:
        """It loaded its model, and its link is open."""
        loaded = self.ready.done() and self.ready.exception() is None
        return loaded and self._transport is not None and not self._transport.is_closing()

    @property
    def jobs(self) -> int:
        """Submitted and not ended."""
        return len(self._sinks)

    async def start(self) -> None:
        """Start the child and tell it what to load; `ready` says when it has."""
        ours, theirs = socket.socketpair()
        try:
            # Not asyncio's own: this takes a millisecond, and cannot be left half done by a cancellation.
            self._process = subprocess.Popen(  # noqa: ASYNC220
                [sys.executable, "-m", "models.llama_cpp.process.child", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # Python looks there first: our packages, whatever lies in the daemon's own folder.
                cwd=_ROOT,
                env=_environment(),
            )
        except OSError as error:
            ours.close()
            raise EngineUnavailable(f"the engine child cannot be started: {error}", phase="connect") from error
        finally:
            theirs.close()
        ours.setblocking(False)
        try:
            self._transport, _ = await self._loop.create_unix_connection(lambda: _ChildConnection(self), sock=ours)
        except BaseException:
            ours.close()
            raise
        self._send(frames.Load(self._options))

    def submit(self, jobs: Iterable[Job], sink: EmissionSink) -> None:
        """`sink` gets each step's emissions of these jobs."""
        jobs = tuple(jobs)
        if self.ended.done():
            sink.lost(self.ended.result())
            return
        if not self._sinks:
            self.progress_at = self._loop.time()
        for job in jobs:
            self._sinks[job.id] = sink
        self._send(frames.Submit(jobs))

    def cancel(self, jobs: Iterable[int]) -> None:
        """Forget jobs; the child frees them within a step."""
        held = tuple(job for job in jobs if self._sinks.pop(job, None) is not None)
        if held:
            self._send(frames.Cancel(held))

    async def count(self, prompt: Prompt) -> int | None:
        """Tokens of a prompt; None when it cannot be counted, or not in time."""
        ask = next(self._asks)
        answer: asyncio.Future[int] = self._loop.create_future()
        self._asked[ask] = answer
        timer = self._loop.call_later(_COUNT_S, self._counted, ask, -1)
        self._send(frames.Count(ask, prompt))
        try:
            tokens = await answer
        finally:
            timer.cancel()
            self._asked.pop(ask, None)
        return tokens if tokens >= 0 else None

    def ping(self) -> None:
        """Ask whether it gets on: the answer moves `progress_at` if it made steps since the last one."""
        self._send(frames.Ping(0))

    def kill(self, reason: str) -> None:
        """At once; `reason` is what `ended` will say."""
        self._failure = self._failure or reason
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

    async def close(self) -> None:
        """Let it end, and make sure that it did."""
        self._failure = self._failure or "the engine was closed"
        if self._transport is not None:
            self._transport.abort()
            await asyncio.shield(self.ended)
        elif self._process is not None:
            self.kill("the engine was closed")
            self._process.wait()

    # --- the link ---------------------------------------------------------------------------------------------------

    def _send(self, message: frames.ToChild) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frames.encode(message))

    def received(self, data: bytes) -> None:
        try:
            for message in self._reader.feed(data):
                self._handle(message)
        except frames.FrameError as error:
            self.kill(f"the engine sent what is no message: {error}")

    def _handle(self, message: frames.FromChild) -> None:
        if isinstance(message, frames.Step):
            self.waiting, self.tokens_per_s = message.waiting, message.tokens_per_s or None
            self.progress_at = self._loop.time()
            self._deliver(message.emissions)
        elif isinstance(message, frames.Counted):
            self._counted(message.ask, message.tokens)
        elif isinstance(message, frames.Ready):
            if not self.ready.done():
                self.ready.set_result(message.info)
        elif isinstance(message, frames.Failed):
            self._failure = message.detail
        elif message.stats.steps != self._steps_seen:
            self._steps_seen = message.stats.steps
            self.progress_at = self._loop.time()

    def _deliver(self, emissions: tuple[Emission, ...]) -> None:
        """Each sink once, with all that is its own."""
        mine: dict[EmissionSink, list[Emission]] = {}
        for emission in emissions:
            last = bool(emission.finish_reason or emission.error)
            sink = self._sinks.pop(emission.job, None) if last else self._sinks.get(emission.job)
            if sink is not None:
                mine.setdefault(sink, []).append(emission)
        for sink, some in mine.items():
            sink.put(some)

    def _counted(self, ask: int, tokens: int) -> None:
        answer = self._asked.get(ask)
        if answer is not None and not answer.done():
            answer.set_result(tokens)

    def lost(self) -> None:
        """The link is closed: the child is ending, or was ended."""
        # Settled however the waiting ends: a loop that is torn down cancels it, and `close` must not wait for ever.
        self._leaving = self._loop.create_task(self._leave())
        self._leaving.add_done_callback(self._settle)

    async def _leave(self) -> None:
        """Give it a moment to end by itself."""
        deadline = self._loop.time() + _END_S
        # A process's end is no event that every loop has.
        while self._process is not None and self._process.poll() is None and self._loop.time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)

    def _settle(self, _: object) -> None:
        """It is gone after this, and everybody who waits for it knows."""
        assert self._process is not None
        if self._process.poll() is None:
            self.kill("the engine closed its link and went on")
        status = self._process.wait()
        reason = self._failure or f"the engine ended: {_told(status)}"
        for ask in list(self._asked):
            self._counted(ask, -1)
        if not self.ready.done():
            self.ready.set_exception(EngineUnavailable(reason, phase="connect"))
            self.ready.exception()  # whoever waits is told; when nobody does, that is no fault
        if not self.ended.done():
            self.ended.set_result(reason)
        sinks, self._sinks = set(self._sinks.values()), {}
        for sink in sinks:
            sink.lost(reason)


class _ChildConnection(asyncio.Protocol):
    """Bytes from the child, and its end."""

    def __init__(self, process: EngineProcess) -> None:
        self._process = process

    def data_received(self, data: bytes) -> None:
        self._process.received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._process.lost()


def _environment() -> dict[str, str]:
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, **_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)}


def _told(status: int) -> str:
    if status >= 0:
        return f"status {status}"
    name = signal.Signals(-status).name
    return f"{name}, out of memory perhaps" if -status == signal.SIGKILL else name
