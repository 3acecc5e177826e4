"""The index: scopes, bounds, and what makes room."""

from __future__ import annotations

import numpy as np
import pytest

from causeway_server.models.catalog.artifact import find_judged_artifact, find_signal
from causeway_server.models.semantic.index import SemanticIndex
from causeway_server.models.semantic.judge import ComparedText, Judge


@pytest.fixture(scope="module")
def judge() -> Judge:
    artifact = find_signal("same-answer")
    return Judge.load(artifact, find_judged_artifact(artifact))


def asked(judge: Judge, text: str) -> ComparedText:
    question = judge.question(text)
    assert question is not None
    return question


def test_scopes_never_share(judge: Judge) -> None:
    index, question = SemanticIndex(judge), asked(judge, "what is the weather today")
    index.add(b"alice", question, b"1")
    assert index.find(b"bob", question) is None
    match = index.find(b"alice", question)
    assert match is not None
    assert (match.key, match.similarity) == (b"1", pytest.approx(1.0, abs=1e-3))


def test_the_entry_used_least_recently_makes_room(judge: Judge) -> None:
    index = SemanticIndex(judge, entries=2)
    first, second, third = (asked(judge, f"what is the weather in {city}") for city in ("rome", "oslo", "bonn"))
    index.add(b"s", first, b"1")
    index.add(b"s", second, b"2")
    index.touch(b"1")
    index.add(b"s", third, b"3")
    assert len(index) == 2
    assert index.find(b"s", second) is None
    for question, key in ((first, b"1"), (third, b"3")):
        match = index.find(b"s", question)
        assert match is not None
        assert match.key == key


def test_one_bucket_keeps_its_entries_through_removals(judge: Judge) -> None:
    """Removing a row moves the last one into its place."""
    index = SemanticIndex(judge)
    texts = ("play music", "play some music", "can you play music", "i want music")
    questions = [asked(judge, text) for text in texts]
    for number, question in enumerate(questions):
        index.add(b"s", question, bytes([number]))
    index.remove(b"\0")
    index.remove(b"\0")
    index.add(b"s", questions[1], b"\1")  # again: replaced
    assert len(index) == 3
    for number in (1, 2, 3):
        match = index.find(b"s", questions[number])
        assert match is not None
        assert match.similarity == pytest.approx(1.0, abs=1e-3)


@pytest.mark.slow
def test_the_nearest_of_many_is_found(judge: Judge) -> None:
    """10,000 entries in one bucket, the default bound: exact inner product finds the equal one."""
    index, question = SemanticIndex(judge), asked(judge, "what is the weather")
    draw = np.random.default_rng(1)
    for number in range(10_000):
        vector = draw.standard_normal(len(question.vector)).astype(np.float32)
        other = ComparedText(
            question.signature, 0, vector / np.linalg.norm(vector), question.intents, ("x",), frozenset({"x"})
        )
        index.add(b"s", other, number.to_bytes(4, "big"))
    index.add(b"s", question, b"it")
    assert len(index) == 10_000
    match = index.find(b"s", question)
    assert match is not None
    assert match.key == b"it"
