"""The daemon's side of one engine child: start it, exchange messages, and notice its end. It runs on any asyncio loop.

A child that ended is never used again; its successor is a new `EngineProcess`.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import subprocess
from collections.abc import Iterable
from typing import Protocol

from causeway_server.router.errors import EngineUnavailable, error_classes

from ...child_process import child_environment, start_child
from .. import protocol
from ..protocol import Emission, EngineOptions, ModelInfo, Prompt, SequenceRequest

_COUNT_S = 2.0  # of the count for a signal
_TOKENIZE_S = 30.0  # of what a client waits for, whose own deadline is usually sooner
_EXIT_S = 2.0
_POLL_S = 0.005
# Waiting threads of llama.cpp spin for some 0.1 ms, longer than most of its barriers take, and then sleep: idle ones
# leave their cores to the daemon, and one that waits for a busy core takes none.
_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "5000",
    "GGML_NO_BACKTRACE": "1",
    "PYTHONUNBUFFERED": "1",
}


class EmissionSink(Protocol):
    """Receives the emissions of certain jobs."""

    def put(self, emissions: list[Emission]) -> None:
        """Receive the emissions of one step."""

    def engine_lost(self, reason: str) -> None:
        """Learn that the child has ended, and that these jobs have ended with it."""


class EngineProcess(asyncio.Protocol):
    """A child process, from `start` to its exit.

    `ready`: the loaded model, or EngineUnavailable. `ended`: the reason, once the child is gone. As of its last step:
    `waiting` jobs, `tokens_per_s` of one sequence, and `progress_at`, its loop time, or that of the submission that
    ended an idle period.
    """

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._loop = asyncio.get_running_loop()
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.Transport | None = None
        self._reader = protocol.FrameReader(protocol.CHILD_MESSAGES)
        self._sinks: dict[int, EmissionSink] = {}
        self._counts: dict[int, asyncio.Future[protocol.Counted]] = {}  # pending count requests by id
        self._request_ids = itertools.count(1)
        self._failure = ""
        self.ready: asyncio.Future[ModelInfo] = self._loop.create_future()
        self.ended: asyncio.Future[str] = self._loop.create_future()
        self.waiting = 0
        self.tokens_per_s: float | None = None
        self.progress_at = self._used_at = self._loop.time()
        self._last_steps = -1
        self._exit_wait: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def alive(self) -> bool:
        """The model is loaded and the link is open."""
        loaded = self.ready.done() and self.ready.exception() is None
        return loaded and self._transport is not None and not self._transport.is_closing()

    @property
    def jobs(self) -> int:
        """Jobs that are submitted and not finished."""
        return len(self._sinks)

    @property
    def idle_s(self) -> float:
        """Seconds since the child last had a job or a prompt to count; 0 while it has one."""
        return 0.0 if self._sinks or self._counts else self._loop.time() - self._used_at

    async def start(self) -> None:
        """Start the child and send it the model to load; await `ready` for the result. Raises EngineUnavailable."""
        try:
            self._process, ours = start_child(
                "causeway_server.models.llama_cpp.process.child", child_environment(**_ENVIRONMENT)
            )
        except OSError as error:
            raise EngineUnavailable(f"The engine child cannot be started: {error}.", phase="connect") from error
        try:
            self._transport, _ = await self._loop.create_unix_connection(lambda: self, sock=ours)
        except BaseException:
            ours.close()
            raise
        self._send(protocol.Load(self._options))

    def submit(self, jobs: Iterable[SequenceRequest], sink: EmissionSink) -> None:
        """Submit jobs; `sink` receives their emissions, step by step."""
        jobs = tuple(jobs)
        if self.ended.done():
            sink.engine_lost(self.ended.result())
            return
        if not self._sinks:
            self.progress_at = self._loop.time()
        for job in jobs:
            self._sinks[job.id] = sink
        self._send(protocol.Submit(jobs))

    def cancel(self, jobs: Iterable[int]) -> None:
        """Forget jobs; the child frees their slots within a step. Finished jobs are ignored."""
        unfinished = tuple(job for job in jobs if self._sinks.pop(job, None) is not None)
        self._used_at = self._loop.time()
        if unfinished:
            self._send(protocol.Cancel(unfinished))

    async def count(self, prompt: Prompt) -> int | None:
        """Return the number of tokens of a prompt; None if it cannot be counted, or not in time."""
        counted = await self._counted(protocol.Count(next(self._request_ids), prompt), _COUNT_S)
        return counted.tokens if counted.tokens >= 0 else None

    async def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the tokens of a prompt. Raises CausewayError if it has none, or not in time."""
        return _checked(await self._counted(protocol.Count(next(self._request_ids), prompt, ids=True), _TOKENIZE_S)).ids

    async def detokenize(self, tokens: tuple[int, ...]) -> str:
        """Return the text of tokens. Raises CausewayError as `tokenize`."""
        return _checked(await self._counted(protocol.Detokenize(next(self._request_ids), tokens), _TOKENIZE_S)).text

    async def _counted(self, message: protocol.Count | protocol.Detokenize, timeout_s: float) -> protocol.Counted:
        request_id = message.request_id
        reply: asyncio.Future[protocol.Counted] = self._loop.create_future()
        self._counts[request_id] = reply
        timer = self._loop.call_later(timeout_s, self._resolve_count, protocol.Counted(request_id, -1))
        self._send(message)
        try:
            return await reply
        finally:
            timer.cancel()
            self._counts.pop(request_id, None)
            self._used_at = self._loop.time()

    def ping(self) -> None:
        """Ask for the engine's statistics; the reply updates `progress_at` if there were steps since the last one."""
        self._send(protocol.Ping())

    def kill(self, reason: str) -> None:
        """Kill the child at once; `reason` becomes the result of `ended`."""
        self._failure = self._failure or reason
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

    async def close(self) -> None:
        """Close the link, and wait until the child is gone."""
        self._failure = self._failure or "the engine was closed"
        if self._transport is not None:
            self._transport.abort()
            await asyncio.shield(self.ended)
        elif self._process is not None:
            self.kill("the engine was closed")
            self._process.wait()

    # --- the link ---------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Handle bytes from the child (asyncio.Protocol)."""
        try:
            for message in self._reader.feed(data):
                self._handle(message)
        except protocol.FrameError as error:
            self.kill(f"the engine sent an invalid message: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the end of the link: the child is exiting or was killed (asyncio.Protocol)."""
        # A done-callback, because a loop that is torn down cancels the task, and `close` must not wait for ever.
        self._exit_wait = self._loop.create_task(self._wait_for_exit())
        self._exit_wait.add_done_callback(self._finish)

    def _send(self, message: protocol.DaemonMessage) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(protocol.encode(message))

    def _handle(self, message: protocol.ChildMessage) -> None:
        if isinstance(message, protocol.Step):
            self.waiting, self.tokens_per_s = message.waiting, message.tokens_per_s or None
            self.progress_at = self._loop.time()
            self._deliver(message.emissions)
        elif isinstance(message, protocol.Counted):
            self._resolve_count(message)
        elif isinstance(message, protocol.Ready):
            self._used_at = self._loop.time()
            if not self.ready.done():
                self.ready.set_result(message.info)
        elif isinstance(message, protocol.Failed):
            self._failure = message.detail
        elif message.stats.steps != self._last_steps:
            self._last_steps = message.stats.steps
            self.progress_at = self._loop.time()

    def _deliver(self, emissions: tuple[Emission, ...]) -> None:
        """Call each sink once, with all of its emissions."""
        by_sink: dict[EmissionSink, list[Emission]] = {}
        for emission in emissions:
            last = bool(emission.finish_reason or emission.error)
            sink = self._sinks.pop(emission.job, None) if last else self._sinks.get(emission.job)
            if sink is not None:
                by_sink.setdefault(sink, []).append(emission)
        for sink, batch in by_sink.items():
            sink.put(batch)

    def _resolve_count(self, counted: protocol.Counted) -> None:
        reply = self._counts.get(counted.request_id)
        if reply is not None and not reply.done():
            reply.set_result(counted)

    async def _wait_for_exit(self) -> None:
        """Give the child a moment to exit on its own."""
        deadline = self._loop.time() + _EXIT_S
        # Polled, because not every loop can watch a process.
        while self._process is not None and self._process.poll() is None and self._loop.time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)

    def _finish(self, _: object) -> None:
        """Reap the child, and notify every waiter and sink."""
        assert self._process is not None
        if self._process.poll() is None:
            self.kill("the engine closed its link but did not exit")
        status = self._process.wait()
        reason = self._failure or f"the engine ended: {_describe_exit(status)}"
        for request_id in list(self._counts):
            self._resolve_count(protocol.Counted(request_id, -1))
        if not self.ready.done():
            self.ready.set_exception(EngineUnavailable(reason, phase="connect"))
            self.ready.exception()  # mark as retrieved: that nothing awaits `ready` is not an error
        if not self.ended.done():
            self.ended.set_result(reason)
        sinks, self._sinks = set(self._sinks.values()), {}
        for sink in sinks:
            sink.engine_lost(reason)


_CODES = error_classes()


def _checked(counted: protocol.Counted) -> protocol.Counted:
    """Return what the child has counted. Raises the error that it reported instead."""
    if counted.tokens >= 0:
        return counted
    if counted.error:
        raise _CODES[counted.error](counted.detail, param=counted.param or None)
    raise EngineUnavailable("Tokens were not counted in time. Try again.", phase="connect", retry_after_s=1.0)


def _describe_exit(status: int) -> str:
    if status >= 0:
        return f"status {status}"
    name = signal.Signals(-status).name
    return f"{name}, perhaps out of memory" if -status == signal.SIGKILL else name
