"""A tiny real model, and a rig that runs jobs on it and collects their emissions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from causeway_server.models.llama_cpp.engine import Engine
from causeway_server.models.llama_cpp.protocol import Emission, EngineOptions, Prompt, SequenceRequest
from causeway_server.models.llama_cpp.scheduling.speculation import DraftPlanner
from causeway_server.router.types import Message, Sampling

from .tiny_gguf import write_tiny_gguf

GREEDY = Sampling(temperature=0.0)
TIMEOUT_S = 60.0


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
    """A running engine; keeps emissions by job. `on_step` is called in the engine's thread after each step."""

    def __init__(
        self,
        options: EngineOptions,
        on_failure: Callable[[Exception], None] | None = None,
        planner: DraftPlanner | None = None,
    ) -> None:
        self.emissions: dict[int, list[Emission]] = {}
        self.steps: list[list[Emission]] = []
        self.on_step: Callable[[list[Emission]], None] = lambda emissions: None
        self._changed = threading.Condition()
        self._next = 0
        self.engine = Engine(options, self._emit, on_failure, planner)
        self.engine.start()

    def _emit(self, emissions: list[Emission]) -> None:
        with self._changed:
            self.steps.append(emissions)
            for emission in emissions:
                self.emissions.setdefault(emission.job, []).append(emission)
            self._changed.notify_all()
        self.on_step(emissions)
        with self._changed:
            self._changed.notify_all()

    def job(self, prompt: Prompt | str, **fields: object) -> SequenceRequest:
        self._next += 1
        if isinstance(prompt, str):
            prompt = Prompt(text=prompt)
        fields.setdefault("sampling", GREEDY)
        fields.setdefault("max_tokens", 8)
        return SequenceRequest(id=self._next, prompt=prompt, **fields)  # type: ignore[arg-type]

    def start(self, prompt: Prompt | str, **fields: object) -> int:
        job = self.job(prompt, **fields)
        self.engine.submit(job)
        return job.id

    def between_steps(self, submit: Callable[[], list[int]]) -> list[int]:
        """Call `submit` between two steps, so that the engine sees its jobs together; return its result."""
        results: list[list[int]] = []

        def on_step(emissions: list[Emission]) -> None:
            self.on_step = lambda emissions: None
            results.append(submit())

        self.on_step = on_step
        self.run("time", max_tokens=1)
        self.wait_for(lambda: bool(results))
        return results[0]

    def finished_jobs(self) -> list[int]:
        """Return jobs in the order in which they ended."""
        return [e.job for step in self.steps for e in step if e.finish_reason or e.error]

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, TIMEOUT_S), "the engine did not reach this state"

    def finished(self, job: int) -> bool:
        return any(e.finish_reason or e.error for e in self.emissions.get(job, ()))

    def answer(self, job: int) -> Answer:
        self.wait_for(lambda: self.finished(job))
        return Answer(self.emissions[job])

    def run(self, prompt: Prompt | str, **fields: object) -> Answer:
        return self.answer(self.start(prompt, **fields))


def chat(*texts: str) -> Prompt:
    """Return a conversation of user and assistant turns."""
    roles = ("user", "assistant")
    return Prompt(messages=tuple(Message(role=roles[i % 2], content=text) for i, text in enumerate(texts)))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="session")
def tiny_options(tiny_model: Path) -> EngineOptions:
    """Without speculation, which depends on measured times."""
    return EngineOptions(
        model_path=str(tiny_model), threads=1, sequences=4, refuse_token="<|refuse|>", prompt_lookup=False
    )


@pytest.fixture(scope="module")
def rig(tiny_options: EngineOptions) -> Iterator[Rig]:
    """One engine for the tests of a module."""
    rig = Rig(tiny_options)
    yield rig
    rig.engine.close()


@pytest.fixture
def make_rig(tiny_options: EngineOptions) -> Iterator[Callable[..., Rig]]:
    """Make engines with changed options; close them at the end."""
    rigs: list[Rig] = []

    def make(planner: DraftPlanner | None = None, **changes: object) -> Rig:
        fields = {name: getattr(tiny_options, name) for name in tiny_options.__struct_fields__} | changes
        rigs.append(Rig(EngineOptions(**fields), planner=planner))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.engine.close()
