"""Embeddings of many requests: texts share batches, callers share the time, long texts are decoded in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from causeway_server.models.llama_cpp.embedding import EmbeddingQueue
from causeway_server.models.llama_cpp.native.vocabulary import Vocabulary
from causeway_server.models.llama_cpp.prompts import SequencePrompt
from causeway_server.models.llama_cpp.protocol import EngineOptions, Prompt, SequenceRequest
from causeway_server.models.llama_cpp.scheduling.sequence import Sequence

from .conftest import GREEDY, Rig
from .tiny_gguf import write_tiny_gguf

LONG = "turn " * 3000
SHORT = [f"{word} the light" for word in ("turn", "play", "stop", "set") * 16]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """An engine with room for long texts."""
    model: Path = write_tiny_gguf(tmp_path_factory.mktemp("long") / "tiny.gguf", context=4096)
    rig = Rig(EngineOptions(model_path=str(model), threads=1, sequences=4, prompt_lookup=False))
    yield rig
    rig.engine.close()


def close(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """Whether two embeddings of length 1 differ by rounding alone: a batch of another size sums in another order."""
    return float(np.dot(one, other)) > 0.999


@pytest.mark.slow
def test_short_texts_do_not_wait_for_a_long_one(rig: Rig) -> None:
    jobs = rig.between_steps(
        lambda: [rig.start(LONG, embed=True, caller="a"), *(rig.start(text, embed=True, caller="b") for text in SHORT)]
    )
    embeddings = [rig.answer(job).end.embedding for job in jobs]
    ends = [job for job in rig.finished_jobs() if job in jobs]
    assert ends[-1] == jobs[0]
    alone = [rig.run(text, embed=True).end.embedding for text in (LONG, *SHORT[:4])]
    assert all(close(*pair) for pair in zip([embeddings[0], *embeddings[1:5]], alone, strict=True))


@pytest.mark.slow
def test_a_caller_s_own_short_texts_do_not_wait_for_its_long_one(rig: Rig) -> None:
    jobs = rig.between_steps(lambda: [rig.start(text, embed=True, caller="a") for text in (LONG, *SHORT)])
    for job in jobs:
        rig.answer(job)
    assert [job for job in rig.finished_jobs() if job in jobs][-1] == jobs[0]


def test_short_texts_share_steps(rig: Rig) -> None:
    before = rig.engine.stats().steps
    jobs = rig.between_steps(lambda: [rig.start(text, embed=True) for text in SHORT])
    for job in jobs:
        assert rig.answer(job).end.embedding
    assert rig.engine.stats().steps - before < len(SHORT)


@pytest.mark.slow
def test_each_chunk_of_a_long_text_is_a_step(rig: Rig) -> None:
    """The daemon restarts an engine that makes no step: a long text must not look like that."""
    before = rig.engine.stats().steps
    rig.run(LONG, embed=True)
    assert rig.engine.stats().steps - before >= 3000 // 256


@pytest.mark.slow
def test_answers_go_on_beside_a_long_text(rig: Rig) -> None:
    jobs = rig.between_steps(lambda: [rig.start(LONG, embed=True), rig.start("hello", max_tokens=8, ignore_eos=True)])
    assert rig.answer(jobs[1]).end.completion_tokens == 8
    assert rig.answer(jobs[0]).end.embedding
    assert [job for job in rig.finished_jobs() if job in jobs] == [jobs[1], jobs[0]]


@pytest.mark.slow
@pytest.mark.parametrize("text", [LONG, SHORT[0]])
def test_a_cancelled_text_leaves_its_room(rig: Rig, text: str) -> None:
    """A text as long as the context is embedded after one that was cancelled in its middle."""
    jobs = rig.between_steps(lambda: [rig.start(LONG, embed=True), rig.start(text, embed=True)])
    rig.engine.cancel(jobs[0])
    assert rig.answer(jobs[1]).end.embedding
    assert rig.run("turn " * 4000, embed=True).end.embedding


@pytest.mark.slow
def test_long_texts_for_which_there_is_no_room_together_follow_each_other(rig: Rig) -> None:
    jobs = rig.between_steps(lambda: [rig.start(LONG, embed=True, caller=caller) for caller in "abc"])
    embeddings = [rig.answer(job).end.embedding for job in jobs]
    assert all(close(embedding, embeddings[0]) for embedding in embeddings)


class Texts:
    """A queue of texts whose prompts are of so many tokens; a short text has at most 10."""

    def __init__(self) -> None:
        self.queue = EmbeddingQueue(short_tokens=10)
        self._names: dict[Sequence, str] = {}

    def add(self, name: str, tokens: int) -> Sequence:
        """Add a text of the caller that the name begins with."""
        job = SequenceRequest(
            id=len(self._names), prompt=Prompt(text=name), sampling=GREEDY, embed=True, caller=name[0]
        )
        text = Sequence(job, SequencePrompt(np.zeros(tokens, np.int32)), 1, None, cast("Vocabulary", None), 0.0)
        self._names[text] = name
        self.queue.append(text)
        return text

    def turns(self) -> list[str]:
        return [" ".join(self._names[text] for text in texts) for _, texts in self.queue.turns()]


@pytest.fixture
def texts() -> Texts:
    return Texts()


def test_callers_take_turns_within_a_batch(texts: Texts) -> None:
    for name in ("a1", "a2", "a3", "b1"):
        texts.add(name, 5)
    assert texts.turns() == ["a1 b1 a2 a3"]


def test_the_flow_that_used_the_least_time_is_first(texts: Texts) -> None:
    long, short = texts.add("a1", 100), texts.add("b1", 5)
    texts.queue.charge(long, 2.0)
    assert texts.turns() == ["b1", "a1"]
    texts.queue.charge(short, 3.0)
    assert texts.turns() == ["a1", "b1"]


def test_a_new_caller_is_not_owed_the_time_before_it_came(texts: Texts) -> None:
    first = texts.add("a1", 100)
    texts.queue.charge(first, 60.0)
    newcomer = texts.add("b1", 100)
    texts.queue.charge(newcomer, 1.0)
    assert texts.turns() == ["a1", "b1"]


def test_a_flow_ends_with_its_last_text(texts: Texts) -> None:
    only: Callable[[], Sequence] = lambda: texts.add("a1", 5)  # noqa: E731
    text = only()
    texts.queue.remove(text)
    assert (len(texts.queue), texts.turns(), list(texts.queue)) == (0, [], [])
    only()
    assert texts.turns() == ["a1"]
