"""Several jobs together: they join and leave between steps, share what they can, and nobody waits for a long prompt."""

from __future__ import annotations

from collections.abc import Callable

from models.llama_cpp.protocol import Emission, Prompt
from router.types import Sampling

from .conftest import Rig, chat

MakeRig = Callable[..., Rig]
LONG = "turn on the light in the kitchen and set the alarm for six " * 6


def test_jobs_run_together(rig: Rig) -> None:
    """Four answers of 40 tokens take far fewer steps than 160."""
    before = rig.engine.stats().steps
    jobs = rig.at_once(lambda: [rig.start(f"hello {i}", max_tokens=40, ignore_eos=True) for i in range(4)])
    assert [rig.answer(job).end.completion_tokens for job in jobs] == [40] * 4
    assert rig.engine.stats().steps - before < 50


def test_a_job_joins_while_others_run(rig: Rig) -> None:
    """A short answer that came later ends before a long one that came first."""
    first = rig.at_once(lambda: [rig.start("hello", max_tokens=300, ignore_eos=True)])[0]
    later = rig.at_once(lambda: [rig.start("world", max_tokens=2)])[0]
    assert rig.answer(first).end.completion_tokens == 300
    assert rig.answer(later).end.finish_reason
    assert rig.ends()[-2:] == [later, first]


def test_more_jobs_than_places_wait_their_turn(make_rig: MakeRig) -> None:
    """With two places five jobs are all answered, in order of arrival."""
    rig = make_rig(sequences=2)
    most = 0

    def watch(emissions: list[Emission]) -> None:
        nonlocal most
        most = max(most, rig.engine.stats().running)

    rig.on_step = watch
    jobs = [rig.start(f"hello {i}", max_tokens=10, ignore_eos=True) for i in range(5)]
    assert all(rig.answer(job).end.completion_tokens == 10 for job in jobs)
    assert most == 2
    assert rig.ends() == sorted(rig.ends())


def test_a_long_prompt_does_not_stall_running_answers(make_rig: MakeRig) -> None:
    """Its prompt is read in pieces, and the running answer gets a token beside each piece."""
    rig = make_rig(batch_tokens=32)
    before = 0

    def begin() -> list[int]:
        nonlocal before
        before = len(rig.steps)
        return [
            rig.start("hello", max_tokens=100, ignore_eos=True),
            rig.start(" ".join(["turn"] * 300), max_tokens=2),
        ]

    running, late = rig.at_once(begin)
    rig.answer(late)
    first = next(i for i, step in enumerate(rig.steps) if any(e.job == late for e in step))
    between = rig.steps[before:first]
    assert len(between) >= 300 // 32 - 1
    # Half a character is told with its other half.
    assert sum(e.tokens for step in between for e in step if e.job == running) >= len(between) - 3


def test_prompts_are_read_side_by_side(make_rig: MakeRig) -> None:
    """A short prompt behind a long one does not wait for all of it."""
    rig = make_rig(batch_tokens=32)
    long, short = rig.at_once(
        lambda: [rig.start(" ".join(["turn"] * 400), max_tokens=1), rig.start("hello", max_tokens=1)]
    )
    rig.answer(long)
    assert rig.ends()[-2:] == [short, long]


def test_a_prompt_s_beginning_is_decoded_once(make_rig: MakeRig) -> None:
    """A later prompt with the same beginning finds it, and its answer is what it would have been without."""
    cold, warm = make_rig(prefix_cache_bytes=0), make_rig()
    prompt = LONG + "hello"
    assert cold.ask(LONG + "world").end.cached_tokens == 0
    without = cold.ask(prompt)
    assert without.end.cached_tokens == 0
    first = warm.ask(LONG + "world")
    assert first.end.cached_tokens == 0
    second = warm.ask(prompt)
    assert second.end.cached_tokens >= second.end.prompt_tokens - 3 > 64
    assert second.text == without.text


def test_a_conversation_goes_on_from_its_last_answer(rig: Rig) -> None:
    """The whole exchange so far is found again, the answer included where its text gives the same tokens."""
    said = rig.ask(chat(LONG), grammar='root ::= "hello world"')
    before = said.end.prompt_tokens
    follow = rig.ask(chat(LONG, said.text, "and now"))
    assert follow.end.cached_tokens >= before


def test_the_same_prompt_again_costs_one_token(rig: Rig) -> None:
    """All but its last token is known; that one is decoded for its logits."""
    first = rig.ask(LONG + " stop")
    again = rig.ask(LONG + " stop")
    assert again.end.cached_tokens == again.end.prompt_tokens - 1
    assert again.text == first.text


def test_saved_beginnings_are_bounded_in_bytes(make_rig: MakeRig) -> None:
    """The least recently used goes first."""
    rig = make_rig(prefix_cache_bytes=400_000)
    prefixes = rig.engine.core.prefix_cache
    assert prefixes is not None
    for number in range(12):
        rig.ask(Prompt(tokens=(6 + number,) * 100))
        assert 0 < prefixes.bytes <= 400_000
    assert 0 < len(prefixes) < 12
    assert rig.ask(Prompt(tokens=(6 + 11,) * 100)).end.cached_tokens == 99
    assert rig.ask(Prompt(tokens=(6,) * 100)).end.cached_tokens == 0


def test_choices_share_their_prompt(make_rig: MakeRig) -> None:
    """n jobs with one prompt: it is decoded once, the others take its cells, and seeds make them differ."""
    rig = make_rig()
    before = rig.engine.stats().steps
    jobs = rig.at_once(lambda: [rig.start(LONG, max_tokens=30, sampling=Sampling(seed=seed)) for seed in (1, 2, 3, 4)])
    answers = [rig.answer(job) for job in jobs]
    cached = sorted(answer.end.cached_tokens for answer in answers)
    assert cached == [0] + [answers[0].end.prompt_tokens - 1] * 3
    assert len({answer.text for answer in answers}) == 4
    assert rig.engine.stats().steps - before < 50


def test_shared_cells_are_counted_once(make_rig: MakeRig) -> None:
    """While n choices run, their common prompt fills its cells one time; at the end none is left in use."""
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
