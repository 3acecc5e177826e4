"""The engine children of this device: `EnginePool`, one engine per model, and `Supervisor`, which keeps a child alive.

A new policy may name other models: their engines start when it is activated, and engines whose model is no longer named
are closed once they have no jobs. Other weights under the same name are loaded beside the old ones (`load_beside`), or
after those are gone. The states of a child:

    starting ──▶ ready ──▶ backing_off ──▶ starting …        it crashed
        │          └──▶ unloaded ──▶ reloading ──▶ ready      no requests for a while: the next one loads it
        └──────▶ failed ──▶ starting …                       the model cannot be loaded: requests fail at once
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Literal, Protocol

import anyio
import anyio.abc

from models.catalog.artifact import ArtifactError
from models.llama_cpp.process.parent import EngineProcess
from models.llama_cpp.protocol import EngineOptions, ModelInfo
from router.errors import EngineUnavailable
from router.policy.compiled import Policy
from router.types import Chunk, EdgeSignals, Embeddings, Request

from ...observability.faults import Fault
from ..backend import Backend, BackendRequest
from .restart_backoff import RestartBackoff

log = logging.getLogger(__name__)

_RETIRE_POLL_S = 0.25
_IDLE_LOOKS = 3
State = Literal["idle", "starting", "ready", "backing_off", "unloaded", "reloading", "failed", "closed"]
_WATCH_S = 1.0
_MAX_RESTART_WAIT_S = (
    2.0  # a request waits for a restart that begins within this time, and is refused before a later one
)


class Engine(Backend, Protocol):
    """What the pool needs of an `EngineBackend`."""

    @property
    def state(self) -> str: ...

    @property
    def restarts(self) -> int: ...

    @property
    def unloads(self) -> int: ...

    @property
    def problem(self) -> str: ...

    @property
    def jobs(self) -> int: ...

    async def start(self) -> None: ...

    async def ready(self, deadline: float) -> None: ...

    async def count(self, request: Request) -> int | None: ...

    def signals(self) -> EdgeSignals: ...


class EnginePool:
    """The `Backend` of the location `edge`.

    Args:
        make: Creates the engine of a model; may raise ArtifactError.
        weights: Returns what tells versions of a model apart, for example the hash of its weights.
    """

    def __init__(self, make: Callable[[str], Engine], weights: Callable[[str], str] = lambda _: "") -> None:
        self._make = make
        self.weights = weights
        self._loaded: dict[str, str] = {}  # model → the weights of its engine
        self._beside: dict[str, Engine] = {}  # model → loaded, and not in use yet
        self._retiring: set[Engine] = set()
        self._engines: dict[str, Engine] = {}
        self._missing: dict[str, str] = {}  # model → why it has no engine
        self._first_model = ""
        self._tasks: anyio.abc.TaskGroup | None = None

    @property
    def state(self) -> str:
        """Of the first edge target's engine; "" without one."""
        if self._first_model in self._missing:
            return "missing"
        engine = self._engines.get(self._first_model)
        return "" if engine is None else str(engine.state)

    @property
    def problems(self) -> tuple[str, ...]:
        """Models without an engine, and engines that are lost."""
        return (*self._missing.values(), *(engine.problem for engine in self._engines.values() if engine.problem))

    def restarts(self) -> Iterable[tuple[str, int]]:
        """Per model, how often its child was restarted."""
        return [(model, engine.restarts) for model, engine in self._engines.items()]

    def unloads(self) -> Iterable[tuple[str, int, bool]]:
        """Per model, how often it left memory for want of requests, and whether it is out of memory now."""
        return [(model, engine.unloads, engine.state == "unloaded") for model, engine in self._engines.items()]

    def use(self, policy: Policy) -> None:
        """Serve the models of this policy's edge targets. Engines start in the background, after `start`."""
        models = list(dict.fromkeys(target.model for target in policy.targets if target.at == "edge"))
        self._first_model = models[0] if models else ""
        self._missing = {model: reason for model, reason in self._missing.items() if model in models}
        outdated = [model for model in self._engines if model not in models or self.is_changed(model)]
        retired = {model: self._engines.pop(model) for model in outdated}
        self._retiring |= set(retired.values())
        added = {model: engine for model in models if (engine := self._add(model)) is not None}
        if self._tasks is not None:
            for model, engine in retired.items():
                self._tasks.start_soon(_guarded, functools.partial(self._retire, engine, added.pop(model, None)))
            for engine in added.values():
                self._tasks.start_soon(_guarded, engine.start)

    def is_changed(self, model: str) -> bool:
        """Whether the engine of a model runs other weights than a new one would, or there is none."""
        return model not in self._engines or self._loaded.get(model) != self.weights(model)

    async def load_beside(self, model: str, deadline: float) -> Engine:
        """Load a model's present weights beside the engine that answers; the next `use` takes it, `drop_beside` not.

        Raises:
            ArtifactError: There is no such model.
            EngineUnavailable: It cannot be loaded until `deadline` (the loop's clock).
        """
        engine = self._make(model)
        try:
            await engine.start()
            await engine.ready(deadline)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await engine.close()
            raise
        self._beside[model] = engine
        return engine

    async def drop_beside(self) -> None:
        """Close what was loaded and is not in use."""
        while self._beside:
            await self._beside.popitem()[1].close()

    async def _retire(self, engine: Engine, successor: Engine | None) -> None:
        """Close an engine once it has no jobs, then start the one that takes its memory."""
        idle_looks = 0
        while idle_looks < _IDLE_LOOKS:  # a request that was just routed here has its job soon
            await asyncio.sleep(_RETIRE_POLL_S)
            idle_looks = 0 if engine.jobs else idle_looks + 1
        await engine.close()
        self._retiring.discard(engine)
        if successor is not None:
            await successor.start()

    def start(self, tasks: anyio.abc.TaskGroup) -> None:
        """Start the engines. `tasks` is the parent of everything that starts or closes them."""
        self._tasks = tasks
        for engine in self._engines.values():
            tasks.start_soon(_guarded, engine.start)

    def _add(self, model: str) -> Engine | None:
        """A new engine for `model`; None if there is one already, or it cannot be created."""
        if model in self._engines:
            return None
        if (loaded := self._beside.pop(model, None)) is not None:
            self._engines[model], self._loaded[model] = loaded, self.weights(model)
            return None
        try:
            engine = self._engines[model] = self._make(model)
            self._loaded[model] = self.weights(model)
        except ArtifactError as error:
            self._missing[model] = str(error)
            log.error("no engine for %s: %s", model, error)
            return None
        self._missing.pop(model, None)
        return engine

    # --- Backend -----------------------------------------------------------------------------------------------------

    def generate(self, call: BackendRequest) -> AsyncIterator[Chunk]:
        return self._engine(call.target.model).generate(call)

    async def embed(self, call: BackendRequest) -> Embeddings:
        return await self._engine(call.target.model).embed(call)

    async def close(self) -> None:
        engines, self._engines = [*self._engines.values(), *self._beside.values(), *self._retiring], {}
        self._beside, self._retiring = {}, set()
        async with anyio.create_task_group() as closing:
            for engine in engines:
                closing.start_soon(engine.close)

    def _engine(self, model: str) -> Engine:
        engine = self._engines.get(model)
        if engine is None:
            reason = self._missing.get(model, "no edge target of the active policy uses it")
            raise EngineUnavailable(f"{model}: {reason}", phase="connect")
        return engine

    # --- signals -----------------------------------------------------------------------------------------------------

    async def count(self, request: Request) -> int | None:
        """`request.prompt_tokens`: the prompt's length in tokens of the first edge target's model."""
        engine = self._engines.get(self._first_model)
        return None if engine is None else await engine.count(request)

    def signals(self) -> EdgeSignals:
        engine = self._engines.get(self._first_model)
        return EdgeSignals() if engine is None else engine.signals()


async def _guarded(work: Callable[[], Awaitable[None]]) -> None:
    """An engine that cannot start or stop is a target that is down; the daemon continues."""
    try:
        await work()
    except Exception as error:
        log.error("an engine could not be started or stopped: %s: %s", type(error).__name__, error)


class Supervisor:
    """Owns one child: starts it, restarts it after a crash, kills it when it is stuck.

    Args:
        name: of the model, for messages.
        stuck_s: a child with jobs that makes no step for so many seconds is killed.
        backoff: the pauses before restarts.
        unload_after_s: a child without jobs for so many seconds is ended; the next request starts another one.
    """

    def __init__(
        self,
        options: EngineOptions,
        name: str,
        *,
        stuck_s: float = 30.0,
        backoff: RestartBackoff | None = None,
        unload_after_s: float = math.inf,
    ) -> None:
        self._options = options
        self._name = name
        self._stuck_s = stuck_s
        self._backoff = backoff or RestartBackoff()
        self._unload_after_s = unload_after_s
        self._wanted = asyncio.Event()  # a request needs the model that was unloaded
        self._load_s = 0.0  # how long the last load took
        self._unloads = 0
        self._restart_at = 0.0  # loop time, while no child runs
        self._process: EngineProcess | None = None
        self._task: asyncio.Task[None] | None = None
        self._waiters: list[asyncio.Future[None]] = []
        self._reason = "it was not started"
        self._started = 0.0
        self._state: State = "idle"
        self._info: ModelInfo | None = None
        self._restarts = 0
        self._lost = Fault(log, logging.ERROR)

    @property
    def state(self) -> State:
        return self._state

    @property
    def info(self) -> ModelInfo | None:
        """Of the model, after it was loaded once."""
        return self._info

    @property
    def problem(self) -> str:
        """Why there is no engine, from a crash or a failed start until it is ready; "" otherwise."""
        return self._lost.problem

    @property
    def restarts(self) -> int:
        """Children that ended unexpectedly."""
        return self._restarts

    @property
    def unloads(self) -> int:
        """Children that were ended for want of requests."""
        return self._unloads

    @property
    def loads_on_demand(self) -> bool:
        """The model was unloaded, and a request gets it loaded again, or is getting it."""
        return self._state in ("unloaded", "reloading")

    @property
    def process(self) -> EngineProcess | None:
        """The child, while it is ready."""
        process = self._process
        return process if self._state == "ready" and process is not None and process.alive else None

    @property
    def pid(self) -> int | None:
        """Of the running child."""
        process = self._process
        return process.pid if process is not None and self._state in ("starting", "ready", "reloading") else None

    def start(self) -> None:
        """Start the child in the background; `close` ends it."""
        if self._task is None:
            self._started = asyncio.get_running_loop().time()
            self._enter("starting", "it is being loaded")
            self._task = asyncio.create_task(self._supervise(), name=f"engine {self._name}")

    async def ready(self, deadline: float) -> EngineProcess:
        """Wait for the child to be ready.

        Raises:
            EngineUnavailable: at the deadline (the loop's clock), or at once when the child cannot become ready, or
                is restarted only later than `_MAX_RESTART_WAIT_S` or the deadline.
        """
        loop = asyncio.get_running_loop()
        while (process := self.process) is None:
            if self._state == "unloaded":
                self._wanted.set()
            pause_s = self._restart_at - loop.time()
            late = pause_s > min(_MAX_RESTART_WAIT_S, deadline - loop.time())
            if self._state in ("idle", "failed", "closed") or (self._state == "backing_off" and late):
                raise EngineUnavailable(
                    f"{self._name}: {self._reason}", phase="connect", retry_after_s=max(1.0, pause_s)
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
                state = self._state.replace("_", " ")
                raise EngineUnavailable(
                    f"{self._name}: still {state} after {waited_s:.1f} s",
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
            self._process = process = EngineProcess(self._options)
            try:
                await self._run(process)
            except EngineUnavailable as error:
                self._pause(None)
                self._enter("failed", error.message)
                self._lost.begin(f"engine {self._name} cannot be started: {error.message}")
            except Exception as error:  # the next try may succeed, and the daemon answers without an engine
                self._pause(None)
                self._enter("failed", f"{type(error).__name__}: {error}")
                if not self._lost.problem:
                    log.debug("engine %s", self._name, exc_info=True)
                self._lost.begin(f"engine {self._name} cannot be started: {type(error).__name__}: {error}")
            finally:
                await asyncio.shield(process.close())
            await self._wait_for_next()

    async def _run(self, process: EngineProcess) -> None:
        """Start the child and watch it until it ends, or until it is unloaded."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        await process.start()
        self._info = await process.ready
        ready_at = loop.time()
        self._load_s = ready_at - began
        self._enter("ready", "")
        if self._lost.problem:
            self._lost.end(f"engine {self._name} is ready again")
        else:
            log.info("engine %s is ready after %.1f s", self._name, self._load_s)
        reason = await self._watch(process)
        if reason is None:
            self._unloads += 1
            log.info("engine %s is unloaded: no requests for %g s", self._name, self._unload_after_s)
            self._enter("unloaded", f"it is unloaded: no requests for {self._unload_after_s:g} s")
            return
        self._restarts += 1
        pause_s = self._pause(ready_at)
        self._enter("backing_off", f"{reason}; it is restarted in {pause_s:.1f} s")
        self._lost.begin(f"engine {self._name}: {reason}; restarting it in {pause_s:.1f} s")

    async def _wait_for_next(self) -> None:
        """Wait until the next child may start: for a request of an unloaded model, else for the end of a pause."""
        loop = asyncio.get_running_loop()
        if self._state == "unloaded":
            await self._wanted.wait()
            self._wanted.clear()
            self._started = loop.time()
            self._enter("reloading", "it is being loaded again")
        else:
            await asyncio.sleep(self._restart_at - loop.time())
            self._enter("starting", "it is being loaded")

    def _pause(self, ready_at: float | None) -> float:
        """Set when the next child starts, after one that was ready at `ready_at`. Returns the pause, seconds."""
        now = asyncio.get_running_loop().time()
        pause_s = self._backoff.pause_s(0.0 if ready_at is None else now - ready_at)
        self._restart_at = now + pause_s
        return pause_s

    async def _watch(self, process: EngineProcess) -> str | None:
        """Wait until the child ends, by itself or because it is stuck, and return why; None: it was idle for long."""
        loop = asyncio.get_running_loop()
        while True:
            timeout_s = min(_WATCH_S, self._stuck_s / 3, self._unload_after_s)
            if (await asyncio.wait([process.ended], timeout=timeout_s))[0]:
                return process.ended.result()
            if not process.jobs:
                if process.idle_s >= self._unload_after_s:
                    return None
                continue
            if loop.time() - process.progress_at > self._stuck_s:
                process.kill(f"it was stuck: {process.jobs} jobs and no step for {self._stuck_s:g} s")
            else:
                process.ping()

    def _enter(self, state: State, reason: str) -> None:
        self._state, self._reason = state, reason
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
