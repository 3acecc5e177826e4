"""Cancels, deadlines and shortages: a job ends within a step, and its cells are free."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from causeway_server.models.llama_cpp.protocol import Emission, EngineOptions, Prompt
from causeway_server.router.types import Sampling

from .conftest import Rig

MakeRig = Callable[..., Rig]
ENDLESS: dict[str, object] = {"max_tokens": None, "ignore_eos": True}


def assert_idle(rig: Rig) -> None:
    stats = rig.engine.stats()
    assert (stats.running, stats.waiting, stats.kv_used) == (0, 0, 0)


@pytest.mark.parametrize("after", [1, 5])
def test_a_cancel_takes_effect_before_the_next_step(rig: Rig, after: int) -> None:
    """Its end is an error, not an answer."""
    job = rig.job("hello", **ENDLESS)
    steps_at_cancel = -1

    def cancel(emissions: list[Emission]) -> None:
        nonlocal steps_at_cancel
        if steps_at_cancel < 0 and sum(e.tokens for e in rig.emissions.get(job.id, ())) >= after:
            steps_at_cancel = rig.engine.stats().steps
            rig.engine.cancel(job.id)

    rig.on_step = cancel
    rig.engine.submit(job)
    answer = rig.answer(job.id)
    rig.on_step = lambda emissions: None
    assert (answer.end.error, answer.end.finish_reason) == ("client_gone", None)
    assert rig.engine.stats().steps == steps_at_cancel
    assert_idle(rig)


def test_a_waiting_job_can_be_cancelled(make_rig: MakeRig) -> None:
    rig = make_rig(sequences=1)

    def submit() -> list[int]:
        jobs = [rig.start("hello", max_tokens=100, ignore_eos=True), rig.start("world", max_tokens=100)]
        rig.engine.cancel(jobs[1])
        return jobs

    running, waiting = rig.between_steps(submit)
    assert rig.answer(waiting).end.error == "client_gone"
    assert rig.answer(waiting).tokens == 0
    assert rig.answer(running).end.completion_tokens == 100


def test_cancelling_an_unknown_or_finished_job_is_ignored(rig: Rig) -> None:
    done = rig.start("hello", max_tokens=1)
    rig.answer(done)
    rig.engine.cancel(done)
    rig.engine.cancel(10**9)
    assert rig.run("hello").end.finish_reason
    assert len([e for e in rig.emissions[done] if e.finish_reason or e.error]) == 1


def test_a_text_being_embedded_can_be_cancelled(rig: Rig) -> None:
    """The next text starts from its own beginning."""
    whole = rig.run("turn " * 200, embed=True).end.embedding
    jobs = rig.between_steps(lambda: [rig.start("hello " * 200, embed=True), rig.start("turn " * 200, embed=True)])
    rig.engine.cancel(jobs[0])
    assert rig.answer(jobs[1]).end.embedding == pytest.approx(whole, abs=1e-3)  # batches of other sizes round otherwise
    assert rig.answer(jobs[0]).end.error in ("client_gone", "")  # it may have been read already


def test_a_deadline_ends_an_answer(rig: Rig) -> None:
    """With an error, not with `stop`."""
    answer = rig.run("hello", deadline_s=0.02, **ENDLESS)
    if answer.end.error:  # a fast machine may reach the context's end first
        assert (answer.end.error, answer.end.finish_reason) == ("deadline_exceeded", None)
    assert_idle(rig)


def test_a_job_past_its_deadline_is_not_started(rig: Rig) -> None:
    before = rig.engine.stats().steps
    answer = rig.run("hello", deadline_s=0.0)
    assert (answer.end.error, answer.tokens) == ("deadline_exceeded", 0)
    assert rig.engine.stats().steps == before


def test_a_deadline_ends_a_waiting_job(make_rig: MakeRig) -> None:
    rig = make_rig(sequences=1)
    running = rig.start("hello", max_tokens=200, ignore_eos=True)
    late = rig.start("world", deadline_s=0.0)
    assert rig.answer(late).end.error == "deadline_exceeded"
    assert rig.answer(running).end.completion_tokens == 200


def test_jobs_beyond_the_queue_are_refused(make_rig: MakeRig) -> None:
    rig = make_rig(sequences=1, queue=2)
    jobs = rig.between_steps(lambda: [rig.start("hello", max_tokens=1) for _ in range(5)])
    ends = [rig.answer(job).end for job in jobs]
    assert [end.error for end in ends[:2]] == ["", ""]
    assert {end.error for end in ends[2:]} == {"queue_full"}


def test_without_free_cells_the_newest_sequence_is_preempted(make_rig: MakeRig) -> None:
    """Every answer is complete in the end, and no text is emitted twice."""
    rig = make_rig(sequences=4, kv_tokens=256, prefix_cache_bytes=0)
    alone = rig.run("hello 0", max_tokens=200, ignore_eos=True)
    jobs = [rig.start(f"hello {i}", max_tokens=200, ignore_eos=True) for i in range(4)]
    answers = [rig.answer(job) for job in jobs]
    assert [answer.end.completion_tokens for answer in answers] == [200] * 4
    assert [answer.tokens for answer in answers] == [200] * 4
    assert answers[0].text == alone.text
    assert_idle(rig)


def test_a_prompt_waits_until_there_are_cells_for_it(make_rig: MakeRig) -> None:
    """It does not preempt a running answer."""
    rig = make_rig(sequences=4, kv_tokens=300)
    first = rig.start(Prompt(tokens=(300,) * 200), max_tokens=40, ignore_eos=True)
    second = rig.start(Prompt(tokens=(301,) * 200), max_tokens=40, ignore_eos=True)
    assert rig.answer(first).end.completion_tokens == rig.answer(second).end.completion_tokens == 40
    spans = {job: [i for i, step in enumerate(rig.steps) if any(e.job == job for e in step)] for job in (first, second)}
    assert max(spans[first]) <= min(spans[second])


def test_a_small_cache_bounds_the_context(make_rig: MakeRig) -> None:
    rig = make_rig(kv_tokens=256)
    assert rig.engine.info.context_tokens == 256
    answer = rig.run("hello", **ENDLESS)
    assert answer.end.prompt_tokens + answer.end.completion_tokens == 256


def test_llama_cpp_s_own_capacity_is_trusted(make_rig: MakeRig) -> None:
    """When it finds fewer cells than counted, the newest sequence is preempted."""
    rig = make_rig(sequences=2, kv_tokens=256, prefix_cache_bytes=0)
    rig.engine.core.kv_cache.total = 10**6
    jobs = rig.between_steps(lambda: [rig.start(f"hello {i}", max_tokens=200, ignore_eos=True) for i in range(2)])
    assert [rig.answer(job).end.completion_tokens for job in jobs] == [200, 200]
    assert rig.engine.stats().kv_total < 260
    assert_idle(rig)


def test_a_single_answer_without_cells_is_out_of_memory(make_rig: MakeRig) -> None:
    """The engine goes on."""
    rig = make_rig(sequences=1, kv_tokens=256, prefix_cache_bytes=0)

    core = rig.engine.core
    core.kv_cache.total = 10**6
    core.info = msgspec.structs.replace(core.info, context_tokens=10**6)
    end = rig.run("hello", max_tokens=10**6, ignore_eos=True).end
    assert (end.error, end.finish_reason) == ("engine_out_of_memory", None)
    assert rig.run("hello").end.finish_reason == "length"
    assert_idle(rig)


def test_a_broken_context_ends_every_job(tiny_options: EngineOptions) -> None:
    """And `on_failure` is called once."""
    failures: list[Exception] = []
    rig = Rig(tiny_options, failures.append)
    jobs = rig.between_steps(lambda: [rig.start(f"hello {i}", max_tokens=100, ignore_eos=True) for i in range(6)])

    def spoil(emissions: list[Emission]) -> None:
        if rig.engine.core.scheduler.current.last_tokens:
            rig.engine.core.scheduler.current.last_tokens[0] = 10**8  # no token

    rig.on_step = spoil
    ends = [rig.answer(job).end for job in jobs]
    assert {end.error for end in ends} == {"engine_crashed"}
    assert "llama_decode returned -1" in ends[0].detail
    rig.engine.close()
    assert len(failures) == 1


@pytest.mark.slow
def test_hundreds_of_jobs_leave_nothing_behind(make_rig: MakeRig) -> None:
    """All kinds at once, some cancelled: each has one end."""
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
    assert_idle(rig)
