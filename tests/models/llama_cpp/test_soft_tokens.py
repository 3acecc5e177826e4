"""Vectors in a prompt: those of tokens' own embedding rows mean what the tokens mean, whatever else the engine does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from causeway_server.models.llama_cpp.protocol import EngineOptions, Prompt, SoftTokens
from causeway_server.router.types import Message, Sampling

from .conftest import Answer, Rig
from .embedding_rows import embedding_rows
from .test_prompt_lookup import EveryDraft
from .tiny_gguf import write_tiny_gguf

MakeRig = Callable[..., Rig]
MB = 1024 * 1024
WORDS = " play some music in the kitchen" * 8
START, END = "turn on the light" * 6, " tell me about the time"


@pytest.fixture(scope="module")
def rows(tiny_model: Path) -> NDArray[np.float32]:
    return embedding_rows(tiny_model)


class Writer:
    """Writes prompts in which words are soft tokens, or tokens."""

    def __init__(self, rig: Rig, rows: NDArray[np.float32]) -> None:
        self._vocabulary = rig.engine.core.vocabulary
        self._rows = rows

    def ids(self, words: str) -> list[int]:
        return [int(token) for token in self._vocabulary.encode(words, special=False)]

    def soft(self, words: str) -> SoftTokens:
        return SoftTokens(self._rows[self.ids(words)].tobytes())

    def hard_prompt(self, *texts: str) -> Prompt:
        return Prompt(tokens=tuple(token for one in texts for token in self.ids(one)))

    def soft_prompt(self, start: str, words: str, end: str) -> Prompt:
        soft = self.soft(words)
        return Prompt(text=start + soft.marker + end, soft=(soft,))


@pytest.fixture
def write(rig: Rig, rows: NDArray[np.float32]) -> Writer:
    return Writer(rig, rows)


@pytest.fixture(scope="module")
def speculating(tiny_options: EngineOptions) -> Iterator[Rig]:
    rig = Rig(msgspec.structs.replace(tiny_options, prompt_lookup=True), planner=EveryDraft())
    yield rig
    rig.engine.close()


def assert_same(soft: Answer, hard: Answer) -> None:
    assert soft.end.finish_reason, soft.end
    assert (soft.text, soft.end.prompt_tokens) == (hard.text, hard.end.prompt_tokens)
    np.testing.assert_allclose(
        [one.logprob for one in soft.logprobs], [one.logprob for one in hard.logprobs], atol=1e-2
    )


@pytest.mark.parametrize("start", [START, ""], ids=["behind text", "first"])
def test_soft_tokens_of_words_mean_these_words(rig: Rig, write: Writer, start: str) -> None:
    fields = {"max_tokens": 30, "ignore_eos": True, "logprobs": 1}
    hard = rig.run(write.hard_prompt(start, WORDS, END), **fields)
    assert_same(rig.run(write.soft_prompt(start, WORDS, END), **fields), hard)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(temperature=0.0), Sampling(temperature=0.7, seed=11), Sampling(temperature=0.0, repeat_penalty=1.3)],
    ids=["greedy", "seeded", "penalised"],
)
def test_speculation_and_penalties_read_the_text_alone(
    rig: Rig, write: Writer, speculating: Rig, sampling: Sampling
) -> None:
    """A draft is never of soft tokens; a word that is only a soft token has no penalty."""
    prompt = write.soft_prompt(START, " seven", END)
    fields = {"max_tokens": 40, "ignore_eos": True, "sampling": sampling, "logprobs": 1}
    assert_same(speculating.run(prompt, **fields), rig.run(prompt, **fields))


def test_a_saved_prefix_is_of_equal_vectors(make_rig: MakeRig, write: Writer) -> None:
    warm, cold = make_rig(), make_rig(prefix_cache_bytes=0)
    before, words = len(write.ids(START)), len(write.ids(WORDS))
    prompt = write.soft_prompt(START, WORDS, END)
    first, again = warm.run(prompt), warm.run(prompt)
    assert (again.text, again.end.cached_tokens) == (first.text, first.end.prompt_tokens - 1)
    unlike = write.soft_prompt(START, WORDS.replace("music", "alarm"), END)
    answer = warm.run(unlike)
    assert answer.end.cached_tokens == before
    assert answer.text == cold.run(unlike).text
    follow = write.soft_prompt(START, WORDS, " stop")
    answer = warm.run(follow)
    assert answer.end.cached_tokens >= before + words
    assert answer.text == cold.run(follow).text


def test_running_answers_go_on_beside_soft_tokens(make_rig: MakeRig, write: Writer) -> None:
    """More soft tokens than a batch takes, of two prompts, while a third one answers."""
    fields = {"max_tokens": 20, "ignore_eos": True}
    prompts = [
        Prompt(text="hello world"),
        write.soft_prompt("hello", WORDS, END),
        write.soft_prompt("", WORDS.replace("some", "the"), END),
    ]
    one, together = make_rig(batch_tokens=32), make_rig(batch_tokens=32)
    alone = [one.run(prompt, **fields).text for prompt in prompts]
    assert alone[1] == one.run(write.hard_prompt("hello", WORDS, END), **fields).text
    jobs = together.between_steps(lambda: [together.start(prompt, **fields) for prompt in prompts])
    assert [together.answer(job).text for job in jobs] == alone
    assert together.engine.stats().kv_used == 0


def test_a_preempted_sequence_decodes_its_soft_tokens_again(make_rig: MakeRig, write: Writer) -> None:
    rig = make_rig(kv_tokens=192, context_tokens=192, prefix_cache_bytes=0)
    fields = {"max_tokens": 90, "ignore_eos": True}
    prompt = write.soft_prompt("hello", WORDS, END)
    alone = rig.run(prompt, **fields).text
    jobs = rig.between_steps(lambda: [rig.start("hello world", **fields), rig.start(prompt, **fields)])
    assert [rig.answer(job).end.finish_reason for job in jobs] == ["length", "length"]
    assert rig.answer(jobs[1]).text == alone


def test_a_stored_system_prompt_ends_before_its_image(make_rig: MakeRig, write: Writer, tmp_path: Path) -> None:
    """Ids of soft tokens mean nothing to the next engine."""
    options = {
        "prompt_folder": str(tmp_path),
        "prompt_key": bytes(32),
        "prompt_bytes": 64 * MB,
        "weights_sha256": "one",
    }
    soft, start = write.soft(WORDS), START * 4
    messages = (Message("system", start + soft.marker + END), Message("user", "hello"))
    rig = make_rig(**options)
    first = rig.run(Prompt(messages=messages, soft=(soft,)), store_prompt=True)
    rig.engine.close()
    again = make_rig(**options).run(Prompt(messages=messages, soft=(soft,)), store_prompt=True)
    assert again.text == first.text
    assert again.end.cached_tokens == 1 + len(write.ids(start))  # with the role


def test_soft_tokens_where_positions_have_parts(make_rig: MakeRig, tmp_path: Path) -> None:
    """llama.cpp reads a vector's position otherwise than a token's there (M-RoPE, as Qwen2-VL)."""
    path = write_tiny_gguf(tmp_path / "parts.gguf", architecture="qwen2vl")
    rig = make_rig(model_path=str(path), prefix_cache_bytes=0)
    write = Writer(rig, embedding_rows(path))
    fields = {"max_tokens": 30, "ignore_eos": True, "logprobs": 1}
    assert_same(
        rig.run(write.soft_prompt(START, WORDS, END), **fields), rig.run(write.hard_prompt(START, WORDS, END), **fields)
    )


def test_vectors_that_the_model_cannot_take_are_refused(rig: Rig, write: Writer, rows: NDArray[np.float32]) -> None:
    good = write.soft(" music")
    broken = rows[:2].copy()
    broken[1, 3] = np.nan
    long = SoftTokens(np.tile(rows[:1], (600, 1)).tobytes())
    for soft, text, code, words in (
        (SoftTokens(bytes(12)), "{} hello", "invalid_value", "12 bytes"),
        (SoftTokens(broken.tobytes()), "{} hello", "invalid_value", "not finite"),
        (good, "hello {}", "invalid_value", "text must follow"),
        (good, "hello", "invalid_value", "leaves soft tokens out"),
        (long, "{} hello", "context_length_exceeded", "601 tokens"),
    ):
        end = rig.run(Prompt(text=text.format(soft.marker), soft=(soft,))).end
        assert (end.error, words in end.detail) == (code, True), end
    refused = rig.run(Prompt(text=good.marker + " hello", soft=(good,)), embed=True)
    assert "without soft tokens" in refused.end.detail
    assert rig.run(write.soft_prompt("hello", " music", END)).end.finish_reason
