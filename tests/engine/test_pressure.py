"""Cancels, deadlines and shortages: what ends, ends within a step, and gives everything back."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from models.llama_cpp.protocol import Emission, EngineOptions, Prompt
from router.types import Sampling

from .conftest import Rig

MakeRig = Callable[..., Rig]
ENDLESS: dict[str, object] = {"max_tokens": None, "ignore_eos": True}


def idle(rig: Rig) -> None:
    stats = rig.engine.stats()
    assert (stats.running, stats.waiting, stats.kv_used) == (0, 0, 0)


@pytest.mark.parametrize("after", [1, 5])
def test_a_cancel_takes_effect_before_the_next_step(rig: Rig, after: int) -> None:
    """No token is made for it any more, its cells are free, and its end is an error, not an answer."""
    job = rig.job("hello", **ENDLESS)
    steps_at_cancel = -1

    def cancel(emissions: list[Emission]) -> None:
        nonlocal steps_at_cancel
        if steps_at_cancel < 0 and sum(e.tokens for e in rig.seen.get(job.id, ())) >= after:
            steps_at_cancel = rig.engine.stats().steps
            rig.engine.cancel(job.id)

    rig.on_step = cancel
    rig.engine.submit(job)
    answer = rig.answer(job.id)
    rig.on_step = lambda emissions: None
    assert (answer.end.error, answer.end.finish_reason) == ("client_gone", None)
    assert rig.engine.stats().steps == steps_at_cancel
    idle(rig)


def test_a_waiting_job_can_be_cancelled(make_rig: MakeRig) -> None:
    """It never runs; the one that runs is not disturbed."""
    rig = make_rig(sequences=1)

    def begin() -> list[int]:
        jobs = [rig.start("hello", max_tokens=100, ignore_eos=True), rig.start("world", max_tokens=100)]
        rig.engine.cancel(jobs[1])
        return jobs

    running, waiting = rig.at_once(begin)
    assert rig.answer(waiting).end.error == "client_gone"
    assert rig.answer(waiting).tokens == 0
    assert rig.answer(running).end.completion_tokens == 100


def test_cancelling_what_is_not_there_is_nothing(rig: Rig) -> None:
    """Unknown and ended jobs are no error."""
    done = rig.start("hello", max_tokens=1)
    rig.answer(done)
    rig.engine.cancel(done)
    rig.engine.cancel(10**9)
    assert rig.ask("hello").end.finish_reason
    assert len([e for e in rig.seen[done] if e.finish_reason or e.error]) == 1


def test_a_text_being_embedded_can_be_cancelled(rig: Rig) -> None:
    """The next one is read from its own beginning."""
    whole = rig.ask("turn " * 200, embed=True).end.embedding
    jobs = rig.at_once(lambda: [rig.start("hello " * 200, embed=True), rig.start("turn " * 200, embed=True)])
    rig.engine.cancel(jobs[0])
    assert rig.answer(jobs[1]).end.embedding == pytest.approx(whole, abs=1e-6)
    assert rig.answer(jobs[0]).end.error in ("client_gone", "")  # it may have been read already


def test_a_deadline_ends_an_answer(rig: Rig) -> None:
    """With an error, not with `stop`; what it held is free."""
    answer = rig.ask("hello", deadline_s=0.02, **ENDLESS)
    if answer.end.error:  # a fast machine may reach the context's end first
        assert (answer.end.error, answer.end.finish_reason) == ("deadline_exceeded", None)
    idle(rig)


def test_a_deadline_that_has_passed_lets_nothing_begin(rig: Rig) -> None:
    """No step is made for it."""
    before = rig.engine.stats().steps
    answer = rig.ask("hello", deadline_s=0.0)
    assert (answer.end.error, answer.tokens) == ("deadline_exceeded", 0)
    assert rig.engine.stats().steps == before


def test_a_deadline_ends_a_waiting_job(make_rig: MakeRig) -> None:
    """Also one that never got a place; the others go on."""
    rig = make_rig(sequences=1)
    running = rig.start("hello", max_tokens=200, ignore_eos=True)
    late = rig.start("world", deadline_s=0.0)
    assert rig.answer(late).end.error == "deadline_exceeded"
    assert rig.answer(running).end.completion_tokens == 200


def test_beyond_the_queue_jobs_are_refused(make_rig: MakeRig) -> None:
    """At once, with an error that another attempt may follow."""
    rig = make_rig(sequences=1, queue=2)
    jobs = rig.at_once(lambda: [rig.start("hello", max_tokens=1) for _ in range(5)])
    ends = [rig.answer(job).end for job in jobs]
    assert [end.error for end in ends[:2]] == ["", ""]
    assert {end.error for end in ends[2:]} == {"queue_full"}


def test_when_cells_run_out_the_newest_answer_starts_over(make_rig: MakeRig) -> None:
    """Every answer is whole in the end, and no text is told twice."""
    rig = make_rig(sequences=4, kv_tokens=256, prefix_cache_bytes=0)
    alone = rig.ask("hello 0", max_tokens=200, ignore_eos=True)
    jobs = [rig.start(f"hello {i}", max_tokens=200, ignore_eos=True) for i in range(4)]
    answers = [rig.answer(job) for job in jobs]
    assert [answer.end.completion_tokens for answer in answers] == [200] * 4
    assert [answer.tokens for answer in answers] == [200] * 4
    assert answers[0].text == alone.text
    idle(rig)


def test_a_prompt_waits_until_there_are_cells_for_it(make_rig: MakeRig) -> None:
    """It does not push out an answer that is running."""
    rig = make_rig(sequences=4, kv_tokens=300)
    first = rig.start(Prompt(tokens=(300,) * 200), max_tokens=40, ignore_eos=True)
    second = rig.start(Prompt(tokens=(301,) * 200), max_tokens=40, ignore_eos=True)
    assert rig.answer(first).end.completion_tokens == rig.answer(second).end.completion_tokens == 40
    spans = {job: [i for i, step in enumerate(rig.steps) if any(e.job == job for e in step)] for job in (first, second)}
    assert max(spans[first]) <= min(spans[second])


def test_a_small_cache_bounds_the_context(make_rig: MakeRig) -> None:
    """One sequence can never need more cells than there are."""
    rig = make_rig(kv_tokens=256)
    assert rig.engine.info.context_tokens == 256
    answer = rig.ask("hello", **ENDLESS)
    assert answer.end.prompt_tokens + answer.end.completion_tokens == 256


def test_when_llama_cpp_finds_fewer_cells_than_counted_the_newest_starts_over(make_rig: MakeRig) -> None:
    """llama_decode's own no is believed: both answers are whole in the end."""
    rig = make_rig(sequences=2, kv_tokens=256, prefix_cache_bytes=0)
    rig.engine.core.kv_cache.total = 10**6
    jobs = rig.at_once(lambda: [rig.start(f"hello {i}", max_tokens=200, ignore_eos=True) for i in range(2)])
    assert [rig.answer(job).end.completion_tokens for job in jobs] == [200, 200]
    assert rig.engine.stats().kv_total < 260
    idle(rig)


def test_a_single_answer_without_cells_is_out_of_memory(make_rig: MakeRig) -> None:
    """There is nobody to make room for it: it ends with an error, and the engine goes on."""
    rig = make_rig(sequences=1, kv_tokens=256, prefix_cache_bytes=0)

    core = rig.engine.core
    core.kv_cache.total = 10**6
    core.info = msgspec.structs.replace(core.info, context_tokens=10**6)
    end = rig.ask("hello", max_tokens=10**6, ignore_eos=True).end
    assert (end.error, end.finish_reason) == ("engine_out_of_memory", None)
    assert rig.ask("hello").end.finish_reason == "length"
    idle(rig)


def test_a_broken_context_ends_every_job_and_says_so(tiny_options: EngineOptions) -> None:
    """llama_decode fails for good: no job is left without an end, and whoever owns the engine is told."""
    told: list[Exception] = []
    rig = Rig(tiny_options, told.append)
    jobs = rig.at_once(lambda: [rig.start(f"hello {i}", max_tokens=100, ignore_eos=True) for i in range(6)])

    def spoil(emissions: list[Emission]) -> None:
        if rig.engine.core.scheduler.last_tokens:
            rig.engine.core.scheduler.last_tokens[0] = 10**8  # no token

    rig.on_step = spoil
    ends = [rig.answer(job).end for job in jobs]
    assert {end.error for end in ends} == {"engine_crashed"}
    assert "llama_decode failed with -1" in ends[0].detail
    rig.engine.close()
    assert len(told) == 1


def test_hundreds_of_jobs_leave_nothing_behind(make_rig: MakeRig) -> None:
    """All kinds at once, some cancelled: each has one end, and the engine is empty after."""
    rig = make_rig(sequences=4, queue=1000)
    kinds: list[dict[str, object]] = [
        {},
        {"sampling": Sampling(seed=1, top_p=0.9)},
        {"json_schema": '{"type":"object"}'},
        {"stop": ("e",)},
        {"logprobs": 2},
        {"embed": True},
        {"confidence_tokens": 2},
        {"deadline_s": 0.001},
    ]
    jobs = [rig.start(f"hello {i % 7} " * (1 + i % 5), **kinds[i % len(kinds)]) for i in range(240)]
    for job in jobs[::11]:
        rig.engine.cancel(job)
    for job in jobs:
        ends = [e for e in rig.answer(job).emissions if e.finish_reason or e.error]
        assert len(ends) == 1
        assert ends[0].error in ("", "client_gone", "deadline_exceeded")
    idle(rig)
