"""Keeps one engine child alive: starts it, starts it again after a crash, kills it when it is stuck.

starting ──▶ ready ──▶ backing_off ──▶ starting …        a crash
    └──────▶ failed ──▶ starting …                       the model cannot be loaded: nobody waits for that
"""

from __future__ import annotations

import asyncio
import logging
from typing import Literal

from models.llama_cpp.process.parent import EngineProcess
from models.llama_cpp.protocol import EngineOptions, ModelInfo
from router.errors import EngineUnavailable

log = logging.getLogger(__name__)

State = Literal["idle", "starting", "ready", "backing_off", "failed", "closed"]
_FIRST_BACKOFF_S = 0.1
_LONGEST_BACKOFF_S = 30.0
_STEADY_S = 30.0  # a child that lived this long starts its successors' back-off from the beginning
_WATCH_S = 1.0


class Supervisor:
    """One owner of the child. `stuck_s`: work, but no step for so long, means that it will never make one."""

    def __init__(self, options: EngineOptions, name: str, *, stuck_s: float = 30.0) -> None:
        self._options = options
        self._name = name
        self._stuck_s = stuck_s
        self._process: EngineProcess | None = None
        self._task: asyncio.Task[None] | None = None
        self._waiters: list[asyncio.Future[None]] = []
        self._reason = "it was not started"
        self._started = 0.0
        self.state: State = "idle"
        self.info: ModelInfo | None = None
        self.restarts = 0  # children that ended without being asked to

    @property
    def process(self) -> EngineProcess | None:
        """The child, while it is ready."""
        process = self._process
        return process if self.state == "ready" and process is not None and process.alive else None

    @property
    def pid(self) -> int | None:
        """Of the child that lives now."""
        process = self._process
        return process.pid if process is not None and self.state in ("starting", "ready") else None

    def start(self) -> None:
        """Begin; `close` ends what this begins."""
        if self._task is None:
            self._started = asyncio.get_running_loop().time()
            self._enter("starting", "it is being loaded")
            self._task = asyncio.create_task(self._keep(), name=f"engine {self._name}")

    async def ready(self, deadline: float) -> EngineProcess:
        """The child, as soon as it can answer.

        Raises EngineUnavailable at the deadline (the loop's clock), or at once when waiting would be in vain.
        """
        loop = asyncio.get_running_loop()
        while (process := self.process) is None:
            if self.state in ("idle", "failed", "closed"):
                raise EngineUnavailable(f"{self._name}: {self._reason}", phase="connect", retry_after_s=1.0)
            changed: asyncio.Future[None] = loop.create_future()
            self._waiters.append(changed)
            # Not `wait_for`: when both come at once, Python 3.11's lets an end of waiting swallow a cancellation.
            try:
                done, _ = await asyncio.wait([changed], timeout=max(0.0, deadline - loop.time()))
            finally:
                self._waiters = [waiter for waiter in self._waiters if waiter is not changed]
            if not done:
                waited = loop.time() - self._started
                state = self.state.replace("_", " ")
                raise EngineUnavailable(f"{self._name}: still {state} after {waited:.1f} s", phase="connect")
        return process

    async def close(self) -> None:
        task, self._task = self._task, None
        try:
            if task is not None:
                task.cancel()
                await asyncio.wait([task])  # Not `await task`: a cancellation of whoever closes would look like its.
                if not task.cancelled():
                    task.result()
        finally:
            self._enter("closed", "it was closed")

    async def _keep(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        loop = asyncio.get_running_loop()
        while True:
            self._enter("starting", "it is being loaded")
            began = loop.time()
            self._process = process = EngineProcess(self._options)
            try:
                await process.start()
                self.info = await process.ready
                self._enter("ready", "")
                reason = await self._watch(process)
                self.restarts += 1
                self._enter("backing_off", reason)
                log.error("engine %s: %s; it is started again", self._name, reason)
            except EngineUnavailable as error:
                self._enter("failed", error.message)
                log.error("engine %s cannot be started: %s", self._name, error.message)
            except Exception as error:  # whatever it is, the next try may go better, and the daemon answers without it
                self._enter("failed", f"{type(error).__name__}: {error}")
                log.exception("engine %s", self._name)
            finally:
                await asyncio.shield(process.close())
            if loop.time() - began > _STEADY_S:
                backoff_s = _FIRST_BACKOFF_S
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)

    async def _watch(self, process: EngineProcess) -> str:
        """Until the child ends, by itself or because it is stuck; why."""
        loop = asyncio.get_running_loop()
        while True:
            if (await asyncio.wait([process.ended], timeout=min(_WATCH_S, self._stuck_s / 3)))[0]:
                return process.ended.result()
            if not process.jobs:
                continue
            if loop.time() - process.progress_at > self._stuck_s:
                process.kill(f"it was stuck: {process.jobs} jobs and no step for {self._stuck_s:g} s")
            else:
                process.ping()

    def _enter(self, state: State, reason: str) -> None:
        self.state, self._reason = state, reason
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
