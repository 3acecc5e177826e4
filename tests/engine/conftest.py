"""A tiny real model, and an engine on it that is told what to do and asked what came out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from models.llama_cpp.engine import Engine
from models.llama_cpp.protocol import Emission, EngineOptions, Job, Prompt
from router.types import Message, Sampling

from .tiny_gguf import write_tiny_gguf

GREEDY = Sampling(temperature=0.0)
PATIENCE_S = 60.0


class Answer:
    """All emissions of one job, put together."""

    def __init__(self, emissions: list[Emission]) -> None:
        self.emissions = emissions
        self.text = "".join(e.text for e in emissions)
        self.tokens = sum(e.tokens for e in emissions)
        self.end = emissions[-1]
        self.logprobs = [entry for e in emissions for entry in e.logprobs]
        self.confidences = [e.confidence for e in emissions if e.confidence is not None]


class Rig:
    """A running engine, its emissions kept by job. `on_step` is called in the engine's thread after each step."""

    def __init__(self, options: EngineOptions, on_failure: Callable[[Exception], None] | None = None) -> None:
        self.seen: dict[int, list[Emission]] = {}
        self.steps: list[list[Emission]] = []
        self.on_step: Callable[[list[Emission]], None] = lambda emissions: None
        self._changed = threading.Condition()
        self._next = 0
        self.engine = Engine(options, self._emit, on_failure)
        self.engine.start()

    def _emit(self, emissions: list[Emission]) -> None:
        with self._changed:
            self.steps.append(emissions)
            for emission in emissions:
                self.seen.setdefault(emission.job, []).append(emission)
            self._changed.notify_all()
        self.on_step(emissions)
        with self._changed:
            self._changed.notify_all()

    def job(self, prompt: Prompt | str, **fields: object) -> Job:
        self._next += 1
        if isinstance(prompt, str):
            prompt = Prompt(text=prompt)
        fields.setdefault("sampling", GREEDY)
        fields.setdefault("max_tokens", 8)
        return Job(id=self._next, prompt=prompt, **fields)  # type: ignore[arg-type]

    def start(self, prompt: Prompt | str, **fields: object) -> int:
        job = self.job(prompt, **fields)
        self.engine.submit(job)
        return job.id

    def at_once(self, begin: Callable[[], list[int]]) -> list[int]:
        """What `begin` returns, after it ran between two steps: the engine sees all that it submits together."""
        begun: list[list[int]] = []

        def between(emissions: list[Emission]) -> None:
            self.on_step = lambda emissions: None
            begun.append(begin())

        self.on_step = between
        self.ask("time", max_tokens=1)
        self.wait_for(lambda: bool(begun))
        return begun[0]

    def ends(self) -> list[int]:
        """Jobs in the order in which they ended."""
        return [e.job for step in self.steps for e in step if e.finish_reason or e.error]

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, PATIENCE_S), "the engine did not get there"

    def ended(self, job: int) -> bool:
        return any(e.finish_reason or e.error for e in self.seen.get(job, ()))

    def answer(self, job: int) -> Answer:
        self.wait_for(lambda: self.ended(job))
        return Answer(self.seen[job])

    def ask(self, prompt: Prompt | str, **fields: object) -> Answer:
        return self.answer(self.start(prompt, **fields))


def chat(*texts: str) -> Prompt:
    """User and assistant in turns."""
    roles = ("user", "assistant")
    return Prompt(messages=tuple(Message(role=roles[i % 2], content=text) for i, text in enumerate(texts)))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="session")
def tiny_options(tiny_model: Path) -> EngineOptions:
    return EngineOptions(model_path=str(tiny_model), threads=1, sequences=4, refuse_token="<|refuse|>")


@pytest.fixture(scope="module")
def rig(tiny_options: EngineOptions) -> Iterator[Rig]:
    """One engine for a module's tests."""
    made = Rig(tiny_options)
    yield made
    made.engine.close()


@pytest.fixture
def make_rig(tiny_options: EngineOptions) -> Iterator[Callable[..., Rig]]:
    """Engines with options of their own."""
    made: list[Rig] = []

    def make(**changes: object) -> Rig:
        fields = {name: getattr(tiny_options, name) for name in tiny_options.__struct_fields__} | changes
        made.append(Rig(EngineOptions(**fields)))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.engine.close()
