"""LoRA adapters: a job gets the answers of the model with its adapter's weights, whatever runs beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from causeway_server.models.llama_cpp.prompts import SequencePrompt
from causeway_server.models.llama_cpp.protocol import AdapterFile, EngineOptions, Prompt, SequenceRequest
from causeway_server.models.llama_cpp.scheduling.scheduler import AdapterTurns
from causeway_server.models.llama_cpp.scheduling.sequence import Sequence

from .conftest import Answer, Rig
from .test_prompt_lookup import EveryDraft
from .tiny_adapter import write_merged_gguf, write_tiny_adapter

MakeRig = Callable[..., Rig]
PROMPT = "turn on the light in the kitchen and set the alarm for six " * 3
FIELDS = {"max_tokens": 40, "ignore_eos": True, "logprobs": 1}
SCALE = 0.5


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> tuple[AdapterFile, ...]:
    folder = tmp_path_factory.mktemp("adapters")
    (folder / "damaged").write_bytes(write_tiny_adapter(folder / "whole").read_bytes()[:-500])
    return (
        AdapterFile("one", str(write_tiny_adapter(folder / "one", 1))),
        AdapterFile("two", str(write_tiny_adapter(folder / "two", 2)), SCALE),
        AdapterFile("damaged", str(folder / "damaged")),
        AdapterFile("missing", str(folder / "missing")),
    )


@pytest.fixture(scope="module")
def rig(tiny_options: EngineOptions, adapters: tuple[AdapterFile, ...]) -> Iterator[Rig]:
    """One engine with all adapters, which drafts as much as it can."""
    options = msgspec.structs.replace(tiny_options, adapters=adapters, prompt_lookup=True)
    rig = Rig(options, planner=EveryDraft())
    yield rig
    rig.engine.close()


@pytest.fixture(scope="module")
def merged(tiny_options: EngineOptions, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Rig]]:
    """Engines of the tiny model with the weights of an adapter added to its own; "": without."""
    folder = tmp_path_factory.mktemp("merged")
    files = {
        "": Path(tiny_options.model_path),
        "one": write_merged_gguf(folder / "one.gguf", 1),
        "two": write_merged_gguf(folder / "two.gguf", 2, SCALE),
    }
    rigs = {name: Rig(msgspec.structs.replace(tiny_options, model_path=str(file))) for name, file in files.items()}
    yield rigs
    for rig in rigs.values():
        rig.engine.close()


def assert_same(answer: Answer, expected: Answer) -> None:
    assert (answer.text, answer.tokens) == (expected.text, expected.tokens)
    np.testing.assert_allclose(logprobs_of(answer), logprobs_of(expected), atol=2e-2)


def logprobs_of(answer: Answer) -> list[float]:
    return [one.logprob for one in answer.logprobs]


def test_answers_are_those_of_the_merged_weights(rig: Rig, merged: dict[str, Rig]) -> None:
    """One after the other, so that each changes the adapter."""
    texts = []
    for name in ("one", "", "two", "one"):
        answer = rig.run(PROMPT, adapter=name, **FIELDS)
        assert_same(answer, merged[name].run(PROMPT, **FIELDS))
        texts.append(answer.text)
    assert len(set(texts)) == 3


def test_streams_of_several_adapters_together_end_as_alone(rig: Rig, merged: dict[str, Rig]) -> None:
    asked = [("one", PROMPT), ("", PROMPT), ("two", PROMPT), ("one", "hello world " * 8), ("", "time"), ("two", "who")]
    jobs = rig.between_steps(lambda: [rig.start(prompt, adapter=name, **FIELDS) for name, prompt in asked])
    for job, (name, prompt) in zip(jobs, asked, strict=True):
        assert_same(rig.answer(job), merged[name].run(prompt, **FIELDS))


def test_a_prefix_is_shared_only_with_the_same_adapter(rig: Rig) -> None:
    prompt = "please tell me about the weather today and tomorrow in the room " * 3
    cached = [rig.run(prompt, adapter=name, max_tokens=1).end.cached_tokens for name in ("one", "", "two", "one", "")]
    assert cached[:3] == [0, 0, 0]
    assert min(cached[3:]) > 16


def test_embeddings_are_those_of_the_adapter(rig: Rig, merged: dict[str, Rig]) -> None:
    for name in ("one", "", "two"):
        vector = rig.run(PROMPT, adapter=name, embed=True).end.embedding
        expected = merged[name].run(PROMPT, embed=True).end.embedding
        np.testing.assert_allclose(vector, expected, atol=5e-3)


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("nope", "model_not_found", "no adapter `nope`. Its adapters: one, two"),
        ("damaged", "engine_unavailable", "cannot be used"),
        ("missing", "engine_unavailable", "cannot be used"),
    ],
)
def test_an_adapter_that_cannot_be_used_fails_its_own_jobs_only(rig: Rig, name: str, code: str, words: str) -> None:
    end = rig.run(PROMPT, adapter=name).end
    assert end.error == code
    assert words in end.detail
    assert rig.run(PROMPT, adapter="one", max_tokens=1).end.finish_reason == "length"


def test_crowded_and_cancelled_streams_of_several_adapters_leave_no_cells(
    make_rig: MakeRig, adapters: tuple[AdapterFile, ...]
) -> None:
    """The cache is so small that streams are preempted in their turn and out of it."""
    rig = make_rig(kv_tokens=160, context_tokens=160, prefix_cache_bytes=0, adapters=adapters[:2])
    names = ["one", "", "two", "one"]
    jobs = rig.between_steps(lambda: [rig.start(PROMPT, adapter=name, **FIELDS) for name in names])
    rig.engine.cancel(jobs[2])
    ends = [rig.answer(job).end for job in jobs]
    assert [end.completion_tokens for end in (*ends[:2], ends[3])] == [40] * 3
    assert ends[2].error in ("client_gone", "")
    assert rig.engine.stats().kv_used == 0


# --- turns ------------------------------------------------------------------------------------------------------------


def running(rig: Rig, turns: AdapterTurns, name: str) -> None:
    """Let a sequence of an adapter run."""
    job = SequenceRequest(id=1, prompt=Prompt(text="time"), adapter=name)
    sequence = Sequence(job, SequencePrompt(np.zeros(1, np.int32)), 1, None, rig.engine.core.vocabulary, float("inf"))
    turns.group_of(sequence).decoding.append(sequence)


def test_adapters_take_turns_of_equal_length(rig: Rig) -> None:
    turns = AdapterTurns()
    for name in ("", "one", "two"):
        running(rig, turns, name)
    names = []
    for now in (10.0, 10.05, 10.11, 10.15, 10.22, 10.33):
        if turns.is_over(now):
            turns.pass_on(now)
        names.append(turns.current.name)
    assert names == ["one", "one", "two", "two", "", "one"]


def test_a_turn_ends_with_its_last_sequence(rig: Rig) -> None:
    turns = AdapterTurns()
    assert not turns.is_over(1.0)
    running(rig, turns, "one")
    assert turns.is_over(1.0)
    assert turns.pass_on(1.0)
    assert (len(turns), [group.name for group in turns.groups]) == (1, ["one"])
    assert not turns.is_over(9.0)
    running(rig, turns, "two")
    turns.current.decoding.clear()
    assert turns.is_over(1.0)
    assert turns.pass_on(1.0)
    assert (turns.current.name, len(turns.groups)) == ("two", 1)
