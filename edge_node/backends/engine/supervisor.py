"""Keep one engine child alive: start it, restart it after a crash, unload it when it is idle, kill it when it is stuck.

starting ──▶ ready ──▶ backing_off ──▶ starting …        the child crashed
    │          └──▶ unloaded ──▶ reloading ──▶ ready      no requests for a while: the next one loads it
    └──────▶ failed ──▶ starting …                       the model cannot be loaded: requests fail at once
"""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

from causeway_server.models.llama_cpp.process.parent import EngineProcess
from causeway_server.models.llama_cpp.protocol import EngineOptions, ModelInfo
from causeway_server.router.errors import EngineUnavailable

from ...observability.logs import Fault

log = logging.getLogger(__name__)

_FIRST_S = 0.1
_MAX_PAUSE_S = 30.0
_HEALTHY_S = 5.0


class RestartBackoff:
    """Doubles the pause with each child that ends soon, and starts over with `first_s` after one that was ready for
    `healthy_s`. Loading does not count: a large model may load for a minute and crash at its first step.
    """

    def __init__(self, *, first_s: float = _FIRST_S, healthy_s: float = _HEALTHY_S) -> None:
        self._first_s = first_s
        self._healthy_s = healthy_s
        self._next_s = first_s

    def pause_s(self, ready_s: float) -> float:
        """Return the pause after a child that was ready for `ready_s`; 0 if it never was."""
        if ready_s >= self._healthy_s:
            self._next_s = self._first_s
        pause_s, self._next_s = self._next_s, min(2.0 * self._next_s, _MAX_PAUSE_S)
        return pause_s


State = Literal["idle", "starting", "ready", "backing_off", "unloaded", "reloading", "failed", "closed"]
_WATCH_S = 1.0
_MAX_RESTART_WAIT_S = 2.0  # a request waits for a restart within this time, and is refused before a later one


@dataclass(eq=False, repr=False)
class Supervisor:
    """Owns one child: starts it, restarts it after a crash, kills it when it is stuck, and ends it after
    `unload_after_s` of idleness; the next request then starts another one.
    """

    options: EngineOptions
    name: str
    _: KW_ONLY
    stuck_s: float = 30.0  # seconds without a step after which a child with sequences is killed
    backoff: RestartBackoff = field(default_factory=RestartBackoff)
    unload_after_s: float = math.inf
    unloads: int = 0  # number of children that were ended because they were idle
    restarts: int = 0  # number of children that ended unexpectedly
    state: State = "idle"
    # Attributes, not properties: each request reads them.
    serving: EngineProcess | None = None  # the child while it is ready; it may have just died
    info: ModelInfo | None = None  # facts about the model, once it has been loaded
    _wanted: asyncio.Event = field(default_factory=asyncio.Event)  # set when a request needs the unloaded model
    _load_s: float = 0.0  # duration of the last load
    _restart_at: float = 0.0  # loop time of the next start, while no child runs
    _process: EngineProcess | None = None
    _task: asyncio.Task[None] | None = None
    _waiters: list[asyncio.Future[None]] = field(default_factory=list)
    _reason: str = "it was not started"
    _started: float = 0.0
    _lost: Fault = field(default_factory=lambda: Fault(log, logging.ERROR))

    @property
    def problem(self) -> str:
        """Why there is no engine, from a crash or a failed start until it is ready; "" otherwise."""
        return self._lost.problem

    @property
    def loads_on_demand(self) -> bool:
        """Whether the model is unloaded and a request will load it, or is loading it."""
        return self.state in ("unloaded", "reloading")

    @property
    def pid(self) -> int | None:
        """Process id of the running child."""
        process = self._process
        return process.pid if process is not None and self.state in ("starting", "ready", "reloading") else None

    async def start(self) -> None:
        """Start the child in the background; `close` ends it."""
        if self._task is None:
            self._started = asyncio.get_running_loop().time()
            self._enter("starting", "it is being loaded")
            self._task = asyncio.create_task(self._supervise(), name=f"engine {self.name}")

    async def ready(self, deadline: float) -> EngineProcess:
        """Wait until the child is ready, and return it. Raises EngineUnavailable at the deadline (the loop's clock), or
        at once if the child cannot become ready, or will be restarted only after `_MAX_RESTART_WAIT_S` or the deadline.
        """
        loop = asyncio.get_running_loop()
        while (process := self.serving) is None or not process.alive:
            if self.state == "unloaded":
                self._wanted.set()
            pause_s = self._restart_at - loop.time()
            late = pause_s > min(_MAX_RESTART_WAIT_S, deadline - loop.time())
            if self.state in ("idle", "failed", "closed") or (self.state == "backing_off" and late):
                raise EngineUnavailable(
                    f"{self.name}: {self._reason}", phase="connect", retry_after_s=max(1.0, pause_s)
                )
            changed: asyncio.Future[None] = loop.create_future()
            self._waiters.append(changed)
            # Not `wait_for`: if both happen at once, Python 3.11's lets the result swallow a cancellation.
            try:
                done, _ = await asyncio.wait([changed], timeout=max(0.0, deadline - loop.time()))
            finally:
                self._waiters = [waiter for waiter in self._waiters if waiter is not changed]
            if not done:
                waited_s = loop.time() - self._started
                state = self.state.replace("_", " ")
                raise EngineUnavailable(
                    f"{self.name} is still {state} after {waited_s:.1f} s.",
                    phase="connect",
                    retry_after_s=max(1.0, self._load_s - waited_s),
                )
        return process

    async def close(self) -> None:
        task, self._task = self._task, None
        try:
            if task is not None:
                task.cancel()
                await asyncio.wait([task])  # Not `await task`, which cannot tell its cancellation from the caller's.
                if not task.cancelled():
                    task.result()
        finally:
            self._enter("closed", "it was closed")

    async def _supervise(self) -> None:
        while True:
            self._process = process = EngineProcess(self.options)
            try:
                await self._run(process)
            except EngineUnavailable as error:
                self._pause(None)
                self._enter("failed", error.message)
                self._lost.begin(f"Engine {self.name} cannot be started: {error.message}")
            except Exception as error:  # the next attempt may succeed, and the daemon also answers without an engine
                self._pause(None)
                self._enter("failed", f"{type(error).__name__}: {error}")
                if not self._lost.problem:
                    log.debug("Engine %s", self.name, exc_info=True)
                self._lost.begin(f"Engine {self.name} cannot be started: {type(error).__name__}: {error}")
            finally:
                await asyncio.shield(process.close())
            await self._wait_for_next()

    async def _run(self, process: EngineProcess) -> None:
        """Start the child and watch it until it ends, or until it is unloaded."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        await process.start()
        self.info = await process.ready
        ready_at = loop.time()
        self._load_s = ready_at - began
        self._enter("ready", "")
        if self._lost.problem:
            self._lost.end(f"Engine {self.name} is ready again")
        else:
            log.info("Engine %s is ready after %.1f s.", self.name, self._load_s)
        reason = await self._watch(process)
        if reason is None:
            self.unloads += 1
            log.info("Engine %s is unloaded after %g s without requests.", self.name, self.unload_after_s)
            self._enter("unloaded", f"it is unloaded: no requests for {self.unload_after_s:g} s")
            return
        self.restarts += 1
        pause_s = self._pause(ready_at)
        self._enter("backing_off", f"{reason}; it is restarted in {pause_s:.1f} s")
        self._lost.begin(f"Engine {self.name} is restarted in {pause_s:.1f} s: {reason}")

    async def _wait_for_next(self) -> None:
        """Wait until the next child may start: for a request of an unloaded model, else for the end of a pause."""
        loop = asyncio.get_running_loop()
        if self.state == "unloaded":
            await self._wanted.wait()
            self._wanted.clear()
            self._started = loop.time()
            self._enter("reloading", "it is being loaded again")
        else:
            await asyncio.sleep(self._restart_at - loop.time())
            self._enter("starting", "it is being loaded")

    def _pause(self, ready_at: float | None) -> float:
        """Set when the next child starts, after one that was ready at `ready_at`. Return the pause, seconds."""
        now = asyncio.get_running_loop().time()
        pause_s = self.backoff.pause_s(0.0 if ready_at is None else now - ready_at)
        self._restart_at = now + pause_s
        return pause_s

    async def _watch(self, process: EngineProcess) -> str | None:
        """Wait until the child ends, by itself or because it is stuck, and return why; None if it was idle for long."""
        loop = asyncio.get_running_loop()
        while True:
            timeout_s = min(_WATCH_S, self.stuck_s / 3, self.unload_after_s)
            began = loop.time()
            if (await asyncio.wait([process.ended], timeout=timeout_s))[0]:
                return process.ended.result()
            # While the daemon itself was paused, the child was, too, or could not be heard.
            paused_s = max(0.0, loop.time() - began - timeout_s)
            process.progress_at = min(loop.time(), process.progress_at + paused_s)
            if not process.jobs:
                if process.idle_s >= self.unload_after_s:
                    return None
                continue
            if loop.time() - process.progress_at > self.stuck_s:
                process.kill(f"it was stuck: no step for {self.stuck_s:g} s, requests in progress: {process.jobs}")
            else:
                process.ping()

    def _enter(self, state: State, reason: str) -> None:
        self.state, self._reason = state, reason
        self.serving = self._process if state == "ready" else None
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
