"""The number of decoding threads follows what the steps cost, and finding it costs little."""

from __future__ import annotations

from collections.abc import Callable

from causeway_server.models.llama_cpp.native.resources import ThreadTuner, TunersBySize

Cost = Callable[[int], float]


def run(tuner: ThreadTuner, cost: Cost, seconds: float, rows: int = 1) -> float:
    """Take steps for `seconds`; return the share of the time that the best count would not have needed."""
    spent = needed = 0.0
    cheapest = min(map(cost, (1, 2, 4, 6)))
    while spent < seconds:
        step_s = cost(tuner.threads)
        spent += step_s
        needed += cheapest
        tuner.record(rows, step_s / rows, step_s)
    return 1 - needed / spent


def helps(threads: int) -> float:
    return 0.04 / threads


def hurts(threads: int) -> float:
    """A thread waits for its core: what a busy machine does."""
    return 0.0002 if threads == 1 else 0.01 * threads


def test_cores_that_help_are_used() -> None:
    tuner = ThreadTuner(1, lambda: 6)
    run(tuner, helps, 20)
    assert run(tuner, helps, 60) < 0.05


def test_trying_costs_little_where_threads_hurt() -> None:
    assert run(ThreadTuner(1, lambda: 6), hurts, 100) < 0.03


def test_threads_leave_when_load_arrives_and_return_when_it_ends() -> None:
    tuner = ThreadTuner(1, lambda: 2)
    run(tuner, helps, 10)
    run(tuner, hurts, 15)
    assert run(tuner, hurts, 60) < 0.03
    run(tuner, helps, 60)
    assert tuner.threads == 2


def test_a_load_that_passes_during_a_trial_does_not_decide_for_long() -> None:
    """Something else takes the cores for half a second, which makes a trial's steps ten times slower."""
    tuner = ThreadTuner(1, lambda: 2)
    while tuner.threads == 1:
        tuner.record(1, helps(1), helps(1))
    run(tuner, lambda threads: 10 * helps(threads), 0.5)
    assert tuner.best == 1
    run(tuner, helps, 3)
    assert tuner.best == 2


def test_a_gain_of_nothing_keeps_one_thread() -> None:
    tuner = ThreadTuner(2, lambda: 2)
    run(tuner, lambda threads: 0.04, 5)
    assert run(tuner, lambda threads: 0.04 * threads, 60) < 0.03


def test_steps_of_other_sizes_are_not_compared() -> None:
    """Each change of the batch ends the trial: the count stays."""
    tuner = ThreadTuner(1, lambda: 2)
    for step in range(1000):
        rows = 1 + step % 2
        tuner.record(rows, 0.01, 0.01 * rows)
        assert tuner.threads == 1


def test_one_slow_step_does_not_lose_a_trial() -> None:
    """Something else took the core once, in the first step with two threads."""
    tuner = ThreadTuner(1, lambda: 2)
    while tuner.threads == 1:
        tuner.record(1, 0.04, 0.04)
    tuner.record(1, 0.4, 0.4)
    run(tuner, helps, 0.1)
    assert tuner.best == 2


def test_a_trial_that_is_lost_ends_after_two_steps() -> None:
    tuner = ThreadTuner(2, lambda: 2)
    steps = list[int]()
    for _ in range(8):
        steps.append(tuner.threads)
        tuner.record(1, helps(tuner.threads), helps(tuner.threads))
    assert steps == [2, 2, 2, 2, 1, 1, 2, 2]


def test_each_size_of_a_step_finds_its_own_count() -> None:
    """Steps of one row alone gain nothing from a second thread, those of four rows half of their time."""
    tuners = TunersBySize(1, lambda: 2)
    run(tuners.tuner(1), lambda threads: 0.02 if threads == 1 else 0.022, 20)
    four = tuners.tuner(4)
    run(four, lambda threads: 0.1 / threads, 1, rows=4)
    assert (tuners.tuner(1).best, four.best, tuners.tuner(5).best) == (1, 2, 2)


def test_a_size_without_a_decided_trial_has_the_threads_of_smaller_work() -> None:
    """Prompts are seldom enough that a trial of their own takes many requests."""
    tuners = TunersBySize(1, lambda: 2)
    assert tuners.tuner(14, prompt=True).threads == 1
    run(tuners.tuner(2), helps, 20)
    assert [tuners.tuner(rows).threads for rows in (1, 8, 4)] == [1, 2, 2]
    assert tuners.tuner(14, prompt=True).threads == 2


def test_a_size_with_a_decided_trial_keeps_its_count() -> None:
    tuners = TunersBySize(1, lambda: 2)
    run(tuners.tuner(4), lambda threads: 0.04 * threads, 20)
    run(tuners.tuner(1), helps, 20)
    assert (tuners.tuner(4).best, tuners.tuner(1).best) == (1, 2)


def test_a_fixed_count_stays() -> None:
    tuner = ThreadTuner(3, None)
    run(tuner, helps, 10)
    assert tuner.threads == 3


def test_cores_that_are_taken_away_are_not_tried() -> None:
    """A container's cores may change while it runs."""
    cores = [2]
    tuner = ThreadTuner(1, lambda: cores[0])
    run(tuner, helps, 20)
    assert tuner.threads == 2
    cores[0] = 1
    run(tuner, helps, 60)
    counts = set[int]()
    for _ in range(5000):
        counts.add(tuner.threads)
        tuner.record(1, 0.04, 0.04)
    assert counts == {1}


def test_cores_that_were_taken_away_do_not_come_back_from_smaller_sizes() -> None:
    """No step of one row has found out yet, and steps of four rows have had no trial."""
    cores = [4]
    tuners = TunersBySize(1, lambda: cores[0])
    run(tuners.tuner(1), helps, 20)
    assert (tuners.tuner(1).best, tuners.tuner(4).best) == (4, 4)
    cores[0] = 2
    for _ in range(4):
        tuners.tuner(4).record(4, 0.01, 0.04)
    assert (tuners.tuner(1).best, tuners.tuner(4).best) == (4, 2)
