"""The models on the device: one engine for each model that the policy's edge targets name.

A new policy may name other models: theirs are started when it comes into force, and those that nobody names any more
are closed. The engines' own lives (starting, crashing, backing off) are `engine`'s business.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Protocol

import anyio.abc

from models.catalog.artifact import ArtifactError
from router.errors import EngineUnavailable
from router.policy.compiled import Policy
from router.types import Chunk, EdgeSignals, Embeddings, Request

from ..backend import Backend, BackendRequest

log = logging.getLogger(__name__)


class Engine(Backend, Protocol):
    """What this daemon needs of an `engine.EngineBackend`."""

    @property
    def state(self) -> str: ...

    async def start(self) -> None: ...

    async def count(self, request: Request) -> int | None: ...

    def signals(self) -> EdgeSignals: ...

    @property
    def restarts(self) -> int: ...


class EnginePool:
    """A `Backend` for the place `edge`. `make` builds the engine for a model; it may raise ArtifactError."""

    def __init__(self, make: Callable[[str], Engine]) -> None:
        self._make = make
        self._engines: dict[str, Engine] = {}
        self._missing: dict[str, str] = {}  # model → why there is no engine for it
        self._first = ""
        self._tasks: anyio.abc.TaskGroup | None = None

    @property
    def state(self) -> str:
        """Of the first edge target's engine."""
        if self._first in self._missing:
            return "missing"
        engine = self._engines.get(self._first)
        return "" if engine is None else str(engine.state)

    @property
    def problems(self) -> tuple[str, ...]:
        return tuple(self._missing.values())

    def restarts(self) -> Iterable[tuple[str, int]]:
        """How often each model's child had to be replaced."""
        return [(model, engine.restarts) for model, engine in self._engines.items()]

    def use(self, policy: Policy) -> None:
        """From now on the models of this policy. They start in the background, once `run` has given them a parent."""
        models = list(dict.fromkeys(target.model for target in policy.targets if target.at == "edge"))
        self._first = models[0] if models else ""
        gone = [self._engines.pop(model) for model in list(self._engines) if model not in models]
        fresh = [engine for model in models if (engine := self._add(model)) is not None]
        if self._tasks is not None:
            for work in (*[engine.close for engine in gone], *[engine.start for engine in fresh]):
                self._tasks.start_soon(_guarded, work)

    def run(self, tasks: anyio.abc.TaskGroup) -> None:
        """Start the engines; `tasks` is the parent of their starting and closing."""
        self._tasks = tasks
        for engine in self._engines.values():
            tasks.start_soon(_guarded, engine.start)

    def _add(self, model: str) -> Engine | None:
        """A new engine for `model`; None if there is one already, or none can be."""
        if model in self._engines:
            return None
        try:
            engine = self._engines[model] = self._make(model)
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
        engines, self._engines = list(self._engines.values()), {}
        async with anyio.create_task_group() as closing:
            for engine in engines:
                closing.start_soon(engine.close)

    def _engine(self, model: str) -> Engine:
        engine = self._engines.get(model)
        if engine is None:
            why = self._missing.get(model, "no edge target of the policy in force uses it")
            raise EngineUnavailable(f"{model}: {why}", phase="connect")
        return engine

    # --- signals -----------------------------------------------------------------------------------------------------

    async def count(self, request: Request) -> int | None:
        """The prompt's length by the first edge target's model: `request.prompt_tokens`."""
        engine = self._engines.get(self._first)
        return None if engine is None else await engine.count(request)

    def signals(self) -> EdgeSignals:
        engine = self._engines.get(self._first)
        return EdgeSignals() if engine is None else engine.signals()


async def _guarded(work: Callable[[], Awaitable[None]]) -> None:
    """An engine that cannot start or stop is a target that is down; never the end of the daemon."""
    try:
        await work()
    except Exception as error:
        log.error("an engine could not be started or stopped: %s: %s", type(error).__name__, error)
