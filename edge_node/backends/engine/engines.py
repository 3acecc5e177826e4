"""The engines of this device, one per model; together they are the `Backend` for the location `edge`.

A new policy may name other models: their engines start when it is activated, and engines whose model is no longer named
are closed once they are idle. Other weights under the same name are loaded beside the old ones (`load_beside`), or
after those have been unloaded.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

import anyio
import anyio.abc

from causeway_server.models.catalog.artifact import ArtifactError
from causeway_server.router.errors import EngineUnavailable
from causeway_server.router.openai.tokens import TokenList
from causeway_server.router.policy.compiled import Policy
from causeway_server.router.types import Chunk, EdgeSignals, Embeddings, Request

from ..backend import Backend, BackendRequest, EngineWork

log = logging.getLogger(__name__)

_RETIRE_POLL_S = 0.25
_IDLE_LOOKS = 3


class Engine(Backend, Protocol):
    """The part of an `EngineBackend` that the pool uses."""

    @property
    def state(self) -> str: ...

    restarts: int
    unloads: int

    @property
    def problem(self) -> str: ...

    @property
    def jobs(self) -> int: ...

    def generate(self, call: BackendRequest) -> AsyncGenerator[Chunk]: ...

    async def start(self) -> None: ...

    async def ready(self, deadline: float) -> object: ...

    async def count(self, request: Request) -> int | None: ...

    async def tokenize(self, request: Request, *, adds_special: bool = True) -> TokenList: ...

    async def detokenize(self, tokens: tuple[int, ...]) -> str: ...

    def signals(self) -> EdgeSignals: ...


@dataclass(eq=False, repr=False)
class EnginePool:
    """The `Backend` of the location `edge`. `weights` identifies a model's version, such as by the weights' hash."""

    make: Callable[[str], Engine]  # factory for the engine of a model; may raise ArtifactError
    weights: Callable[[str], str] = lambda _: ""
    retire_poll_s: float = _RETIRE_POLL_S  # interval of checking whether an unused engine is idle
    _loaded: dict[str, str] = field(default_factory=dict)  # model → the weights of its engine
    _beside: dict[str, Engine] = field(default_factory=dict)  # model → loaded engine that is not in use yet
    _retiring: set[Engine] = field(default_factory=set)
    _engines: dict[str, Engine] = field(default_factory=dict)
    _missing: dict[str, str] = field(default_factory=dict)  # model → the reason why it has no engine
    _first_model: str = ""
    _tasks: anyio.abc.TaskGroup | None = None
    _answers: int = 0  # that are being generated
    _tokens: int = 0  # generated since the start

    @property
    def state(self) -> str:
        """State of the first edge target's engine; "" if there is none."""
        if self._first_model in self._missing:
            return "missing"
        engine = self._engines.get(self._first_model)
        return "" if engine is None else str(engine.state)

    @property
    def problems(self) -> tuple[str, ...]:
        """Models without an engine, and engines that have failed."""
        return (*self._missing.values(), *(engine.problem for engine in self._engines.values() if engine.problem))

    def restarts(self) -> Iterable[tuple[str, int]]:
        """Number of restarts of the child, per model."""
        return [(model, engine.restarts) for model, engine in self._engines.items()]

    def unloads(self) -> Iterable[tuple[str, int, bool]]:
        """Number of unloads because the model was idle, and whether it is unloaded now, per model."""
        return [(model, engine.unloads, engine.state == "unloaded") for model, engine in self._engines.items()]

    def use(self, policy: Policy) -> None:
        """Serve the models of this policy's edge targets. Engines start in the background, after `start`."""
        models = list(policy.edge_models)
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
        """Return whether the engine of a model runs other weights than a new one would, or does not exist."""
        return model not in self._engines or self._loaded.get(model) != self.weights(model)

    async def load_beside(self, model: str, deadline: float) -> Engine:
        """Load a model's present weights beside the running engine; the next `use` takes it, `drop_beside` discards it.
        Raises ArtifactError if the model does not exist; EngineUnavailable at the `deadline` (the loop's clock).
        """
        engine = self.make(model)
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
        """Close the engines that were loaded beside others and are not in use."""
        while self._beside:
            await self._beside.popitem()[1].close()

    async def _retire(self, engine: Engine, successor: Engine | None) -> None:
        """Close an engine once it is idle, then start the one that takes its memory."""
        idle_checks = 0
        while idle_checks < _IDLE_LOOKS:  # a request that was just routed here submits its sequences soon
            await asyncio.sleep(self.retire_poll_s)
            idle_checks = 0 if engine.jobs else idle_checks + 1
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
        """Return a new engine for `model`; None if there is one already, or it cannot be created."""
        if model in self._engines:
            return None
        if (loaded := self._beside.pop(model, None)) is not None:
            self._engines[model], self._loaded[model] = loaded, self.weights(model)
            return None
        try:
            engine = self._engines[model] = self.make(model)
            self._loaded[model] = self.weights(model)
        except ArtifactError as error:
            self._missing[model] = str(error)
            log.error("There is no engine for the model %s: %s", model, error)
            return None
        self._missing.pop(model, None)
        return engine

    # --- Backend -----------------------------------------------------------------------------------------------------

    async def generate(self, call: BackendRequest) -> AsyncGenerator[Chunk]:
        self._answers += 1
        try:
            async with aclosing(self._engine(call.target.model).generate(call)) as chunks:
                async for chunk in chunks:
                    self._tokens += chunk.tokens
                    yield chunk
        finally:
            self._answers -= 1

    def complete(self, call: BackendRequest) -> None:
        return None

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

    async def count(self, request: Request, model: str = "", /) -> int | None:
        """Return the prompt's length in tokens of a model; "": of the first edge target's (`request.prompt_tokens`)."""
        engine = self._engines.get(model or self._first_model)
        return None if engine is None else await engine.count(request)

    async def tokenize(self, request: Request, model: str, *, adds_special: bool = True) -> TokenList:
        """Return the tokens of a request's only prompt. Raises CausewayError."""
        return await self._engine(model).tokenize(request, adds_special=adds_special)

    async def detokenize(self, tokens: tuple[int, ...], model: str) -> str:
        """Return the text of a model's tokens. Raises CausewayError."""
        return await self._engine(model).detokenize(tokens)

    @property
    def work(self) -> EngineWork:
        """The work of all engines that are in use, for clients or in the background."""
        jobs = sum(engine.jobs for engine in (*self._engines.values(), *self._retiring))
        return EngineWork(jobs, self._answers, self._tokens)

    def signals(self) -> EdgeSignals:
        engine = self._engines.get(self._first_model)
        return EdgeSignals() if engine is None else engine.signals()


async def _guarded(work: Callable[[], Awaitable[None]]) -> None:
    """Do `work`, and log a failure: an engine that cannot start or stop is a target that is down."""
    try:
        await work()
    except Exception as error:
        log.error("An engine could not be started or stopped (%s): %s", type(error).__name__, error)
