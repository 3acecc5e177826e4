"""Several jobs together: they join and leave between steps, share prefixes, and never wait for a long prompt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from causeway_server.models.llama_cpp.protocol import Emission, Prompt
from causeway_server.models.llama_cpp.scheduling.scheduler import in_tiles
from causeway_server.router.types import Sampling

from .conftest import Rig, chat
from .tiny_gguf import write_tiny_gguf

MakeRig = Callable[..., Rig]
LONG = "turn on the light in the kitchen and set the alarm for six " * 6


def test_jobs_run_together(rig: Rig) -> None:
    before = rig.engine.stats().steps
    jobs = rig.between_steps(lambda: [rig.start(f"hello {i}", max_tokens=40, ignore_eos=True) for i in range(4)])
    assert [rig.answer(job).end.completion_tokens for job in jobs] == [40] * 4
    assert rig.engine.stats().steps - before < 50


def test_a_job_joins_while_others_run(rig: Rig) -> None:
    first = rig.between_steps(lambda: [rig.start("hello", max_tokens=300, ignore_eos=True)])[0]
    later = rig.between_steps(lambda: [rig.start("world", max_tokens=2)])[0]
    assert rig.answer(first).end.completion_tokens == 300
    assert rig.answer(later).end.finish_reason
    assert rig.finished_jobs()[-2:] == [later, first]


def test_jobs_beyond_the_slots_wait_in_order(make_rig: MakeRig) -> None:
    rig = make_rig(sequences=2)
    most = 0

    def watch(emissions: list[Emission]) -> None:
        nonlocal most
        most = max(most, rig.engine.stats().running)

    rig.on_step = watch
    jobs = [rig.start(f"hello {i}", max_tokens=10, ignore_eos=True) for i in range(5)]
    assert all(rig.answer(job).end.completion_tokens == 10 for job in jobs)
    assert most == 2
    assert rig.finished_jobs() == sorted(rig.finished_jobs())


def test_a_long_prompt_does_not_stall_running_answers(make_rig: MakeRig) -> None:
    """It is prefilled in chunks, and the running answer gets a token beside each chunk."""
    rig = make_rig(batch_tokens=32)
    before = 0

    def submit() -> list[int]:
        nonlocal before
        before = len(rig.steps)
        return [rig.start("hello", max_tokens=100, ignore_eos=True), rig.start(" ".join(["turn"] * 300), max_tokens=2)]

    running, late = rig.between_steps(submit)
    rig.answer(late)
    first = next(i for i, step in enumerate(rig.steps) if any(e.job == late for e in step))
    between = rig.steps[before:first]
    assert len(between) >= 300 // 32 - 1
    # A token that is part of a character is emitted with the rest of it.
    assert sum(e.tokens for step in between for e in step if e.job == running) >= len(between) - 3


def test_prompts_are_prefilled_side_by_side(make_rig: MakeRig) -> None:
    rig = make_rig(batch_tokens=32)
    long, short = rig.between_steps(
        lambda: [rig.start(" ".join(["turn"] * 400), max_tokens=1), rig.start("hello", max_tokens=1)]
    )
    rig.answer(long)
    assert rig.finished_jobs()[-2:] == [short, long]


def test_a_shared_prefix_is_decoded_once(make_rig: MakeRig) -> None:
    """The answer is the same as without the prefix cache."""
    cold, warm = make_rig(prefix_cache_bytes=0), make_rig()
    prompt = LONG + "hello"
    assert cold.run(LONG + "world").end.cached_tokens == 0
    without = cold.run(prompt)
    assert without.end.cached_tokens == 0
    first = warm.run(LONG + "world")
    assert first.end.cached_tokens == 0
    second = warm.run(prompt)
    assert second.end.cached_tokens >= second.end.prompt_tokens - 3 > 64
    assert second.text == without.text


def test_a_conversation_continues_from_its_cached_turns(rig: Rig) -> None:
    """The answer included, where its text gives the same tokens."""
    first = rig.run(chat(LONG), grammar='start: "hello world"')
    before = first.end.prompt_tokens
    follow = rig.run(chat(LONG, first.text, "and now"))
    assert follow.end.cached_tokens >= before


@pytest.mark.parametrize("prompt", [LONG + " stop", "turn on the light"], ids=["long", "short"])
def test_the_same_prompt_again_costs_one_token(make_rig: MakeRig, prompt: str) -> None:
    """The last token is decoded for its logits."""
    rig = make_rig()
    first = rig.run(prompt)
    again = rig.run(prompt)
    assert first.end.cached_tokens == 0 < again.end.cached_tokens == again.end.prompt_tokens - 1
    assert again.text == first.text


def test_the_prefix_cache_is_bounded_in_bytes(make_rig: MakeRig) -> None:
    """Least recently used first."""
    rig = make_rig(prefix_cache_bytes=400_000)
    prefixes = rig.engine.core.prefix_cache
    assert prefixes is not None
    for number in range(12):
        rig.run(Prompt(tokens=(6 + number,) * 100))
        assert 0 < prefixes.bytes <= 400_000
    assert 0 < len(prefixes) < 12
    assert rig.run(Prompt(tokens=(6 + 11,) * 100)).end.cached_tokens == 99
    assert rig.run(Prompt(tokens=(6,) * 100)).end.cached_tokens == 0


@pytest.mark.parametrize("prompt", [LONG, "turn on the light then wait a while"], ids=["long", "short"])
def test_choices_share_their_prompt(make_rig: MakeRig, prompt: str) -> None:
    """The prompt of n jobs is decoded once; seeds make the answers differ."""
    rig = make_rig()
    before = rig.engine.stats().steps
    jobs = rig.between_steps(
        lambda: [rig.start(prompt, max_tokens=30, sampling=Sampling(seed=seed)) for seed in (1, 2, 3, 4)]
    )
    answers = [rig.answer(job) for job in jobs]
    cached = sorted(answer.end.cached_tokens for answer in answers)
    assert cached == [0] + [answers[0].end.prompt_tokens - 1] * 3
    assert len({answer.text for answer in answers}) == 4
    assert rig.engine.stats().steps - before < 50


def test_shared_cells_are_counted_once(make_rig: MakeRig) -> None:
    rig = make_rig()
    most = 0

    def watch(emissions: list[Emission]) -> None:
        nonlocal most
        most = max(most, rig.engine.stats().kv_used)

    rig.on_step = watch
    jobs = [rig.start(LONG, max_tokens=10, sampling=Sampling(seed=seed), ignore_eos=True) for seed in range(4)]
    prompt = rig.answer(jobs[0]).end.prompt_tokens
    for job in jobs:
        rig.answer(job)
    assert prompt < most <= prompt + 4 * 11
    assert rig.engine.stats().kv_used == 0


def test_a_prefix_longer_than_the_window_is_shared_whole_or_not_at_all(make_rig: MakeRig, tmp_path: Path) -> None:
    """What layers with a sliding window have saved is what the next token sees."""
    path = str(write_tiny_gguf(tmp_path / "window.gguf", architecture="gemma3", window=32))
    warm, cold = make_rig(model_path=path), make_rig(model_path=path, prefix_cache_bytes=0)
    fields = {"max_tokens": 24, "ignore_eos": True, "logprobs": 1}
    warm.run(LONG, max_tokens=1)
    for prompt, shares in ((LONG + " stop", True), (LONG + " hello", True), (LONG, True), (LONG[:-40], False)):
        again, expected = warm.run(prompt, **fields), cold.run(prompt, **fields)
        assert (again.text, again.end.cached_tokens > 0) == (expected.text, shares)
        expected_logprobs = [one.logprob for one in expected.logprobs]
        assert [one.logprob for one in again.logprobs] == pytest.approx(expected_logprobs, abs=0.01)


@pytest.mark.parametrize(
    ("budget", "left", "decoding", "expected"),
    [
        (32, 540, 480, 32),  # no more than 32 fit
        (32, 1000, 0, 64),
        (32, 1000, 4, 60),
        (100, 1000, 0, 100),
        (100, 130, 0, 130),  # not 100 and 30
        (32, 20, 0, 20),
        (512, 540, 0, 476),  # no more than 512 fit
        (512, 512, 0, 512),
        (512, 2000, 12, 500),
    ],
)
def test_a_prompt_is_read_in_tiles(budget: int, left: int, decoding: int, expected: int) -> None:
    """Neither a step nor what is left has fewer than 64 rows, unless the prompt has."""
    assert in_tiles(budget, left, 512 - decoding, decoding) == expected
