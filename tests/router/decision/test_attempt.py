"""One attempt: its table, which chunks are held back and released, and the record of each ending."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from causeway_server.router.decision.attempts import (
    TABLE,
    Attempt,
    AttemptEvent,
    AttemptState,
    HandoffGate,
    IllegalTransition,
)
from causeway_server.router.errors import (
    ClientGone,
    CloudTimeout,
    DeadlineExceeded,
    EngineCrashed,
    LowConfidence,
    StreamBroken,
)
from causeway_server.router.types import AttemptPlan, Chunk, Handoff, Target, ToolCallDelta, Usage
from tests.router.sample_requests import chunk_of, confidence_of, end_chunk

SMALL = Target("small", "edge", "assistant")
HANDOFF = Handoff(after_tokens=3, below=0.5)
FINAL = {
    AttemptState.DONE,
    AttemptState.FAILED,
    AttemptState.HANDED_OFF,
    AttemptState.CANCELLED,
    AttemptState.TIMED_OUT,
}


def new_attempt(
    handoff: Handoff | None = None, *, stream: bool = True, choices: int = 1, started: bool = True
) -> Attempt:
    attempt = Attempt(AttemptPlan(SMALL, handoff), stream=stream, choices=choices, arrived=100.0)
    if started:
        attempt.start(100.5)
    return attempt


# --- the table -------------------------------------------------------------------------------------------------------


def test_every_state_has_a_row_and_final_states_are_final() -> None:
    assert set(TABLE) == set(AttemptState)
    assert {state for state, row in TABLE.items() if not row} == FINAL


def test_only_a_held_attempt_can_hand_off() -> None:
    assert [state for state, row in TABLE.items() if AttemptState.HANDED_OFF in row.values()] == [AttemptState.HOLDING]


def test_a_committed_attempt_never_switches_target() -> None:
    reachable, waiting = set(), [AttemptState.COMMITTED]
    while waiting:
        for following in TABLE[waiting.pop()].values():
            if following not in reachable:
                reachable.add(following)
                waiting.append(following)
    assert reachable == {AttemptState.DONE, AttemptState.FAILED, AttemptState.CANCELLED, AttemptState.TIMED_OUT}


def test_error_cancel_and_deadline_can_come_at_any_moment_before_the_end() -> None:
    for state in set(AttemptState) - FINAL:
        assert {AttemptEvent.ERROR, AttemptEvent.CANCEL, AttemptEvent.DEADLINE} <= set(TABLE[state])


@pytest.mark.parametrize(
    ("state", "event"), [p for p in itertools.product(AttemptState, AttemptEvent) if p[1] not in TABLE[p[0]]]
)
def test_a_missing_key_is_an_illegal_transition(state: AttemptState, event: AttemptEvent) -> None:
    attempt = new_attempt(started=False)
    attempt.state = state
    with pytest.raises(IllegalTransition, match=f"{event.value} is not allowed in the state {state.value}"):
        attempt.transition(event, 101.0)
    assert attempt.state is state


# --- a stream without handoff ----------------------------------------------------------------------------------------


def test_a_stream_is_released_chunk_by_chunk() -> None:
    attempt = new_attempt()
    first, second = chunk_of("a"), chunk_of("b")
    assert attempt.state is AttemptState.WAITING
    assert attempt.receive(first, 101.0) == (first,)
    assert attempt.state is AttemptState.COMMITTED
    assert attempt.receive(second, 102.0) == (second,)
    assert attempt.receive(end_chunk(), 102.5) == (end_chunk(),)
    assert attempt.finish(103.0) == ()
    assert attempt.state is AttemptState.DONE
    record = attempt.record(104.0)
    assert (record.state, record.tokens, record.error) == ("done", 2, "")
    assert (record.started_ms, record.ttft_ms, record.duration_ms) == (500.0, 500.0, 2500.0)


def test_a_stream_that_stops_before_its_end_is_broken() -> None:
    attempt = new_attempt()
    attempt.receive(chunk_of(), 101.0)
    with pytest.raises(StreamBroken) as caught:
        attempt.finish(102.0)
    attempt.fail(caught.value, 102.0)
    assert attempt.state is AttemptState.FAILED
    assert attempt.committed
    assert attempt.record(103.0).error == "stream_broken"


def test_every_choice_must_have_its_end() -> None:
    attempt = new_attempt(choices=2)
    attempt.receive(chunk_of(index=1), 101.0)
    attempt.receive(end_chunk(index=1), 101.0)
    with pytest.raises(StreamBroken):
        attempt.finish(102.0)
    attempt.receive(end_chunk(index=0), 102.0)
    attempt.finish(102.0)
    assert attempt.state is AttemptState.DONE


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (EngineCrashed("gone", phase="stream"), AttemptState.FAILED),
        (CloudTimeout("late"), AttemptState.FAILED),
        (DeadlineExceeded("late"), AttemptState.TIMED_OUT),
        (ClientGone("left"), AttemptState.CANCELLED),
    ],
)
@pytest.mark.parametrize("moment", ["pending", "waiting", "holding", "collecting", "committed"])
def test_each_fault_ends_an_attempt_at_each_moment(error: Exception, state: AttemptState, moment: str) -> None:
    """The fault decides the final state, the moment whether the client has bytes; held chunks are dropped."""
    attempt = new_attempt(
        HANDOFF if moment == "holding" else None, stream=moment != "collecting", started=moment != "pending"
    )
    if moment in ("holding", "collecting", "committed"):
        attempt.receive(chunk_of(), 101.0)
    assert attempt.state.value == moment
    attempt.fail(error, 102.0)  # type: ignore[arg-type]
    assert attempt.state is state
    assert attempt.committed == (moment == "committed")
    assert attempt.record(103.0).error == error.code  # type: ignore[attr-defined]
    assert attempt.held == []


# --- the whole answer at once ----------------------------------------------------------------------------------------


def test_a_whole_answer_is_collected_and_released_at_its_end() -> None:
    """So a late failure can still be answered by the next target."""
    attempt = new_attempt(stream=False)
    chunks = (chunk_of("a"), chunk_of("b"), end_chunk(), Chunk(usage=Usage(3, 2)))
    for chunk in chunks:
        assert attempt.receive(chunk, 101.0) == ()
        assert not attempt.committed
    assert attempt.state is AttemptState.COLLECTING
    assert attempt.finish(102.0) == chunks
    assert attempt.state is AttemptState.DONE
    assert attempt.committed


def test_an_empty_answer_with_an_end_is_an_answer() -> None:
    attempt = new_attempt()
    assert attempt.receive(end_chunk(), 101.0) == (end_chunk(),)
    attempt.finish(101.0)
    assert attempt.state is AttemptState.DONE
    assert attempt.record(102.0).ttft_ms is None


def test_an_embedding_commits_and_ends_at_once() -> None:
    attempt = new_attempt()
    attempt.complete(102.0)
    assert (attempt.state, attempt.committed) == (AttemptState.DONE, True)


def test_a_tool_call_counts_as_the_first_token() -> None:
    attempt = new_attempt()
    attempt.receive(Chunk(), 101.0)
    attempt.receive(Chunk(tool_calls=(ToolCallDelta(0, id="c", name="f"),)), 102.0)
    assert attempt.record(103.0).ttft_ms == 1500.0


# --- holding back ----------------------------------------------------------------------------------------------------


def test_first_tokens_are_held_until_their_confidence_is_known() -> None:
    attempt = new_attempt(HANDOFF)
    held = [chunk_of("a", score=0.1), chunk_of("b", score=0.3)]
    assert [attempt.receive(p, 101.0) for p in held] == [(), ()]
    assert attempt.state is AttemptState.HOLDING
    third = chunk_of("c", score=0.9)
    assert attempt.receive(third, 102.0) == (*held, third)
    assert attempt.state is AttemptState.COMMITTED
    later = chunk_of("d", score=0.0)
    assert attempt.receive(later, 103.0) == (later,)
    assert attempt.record(104.0).tokens == 4


def test_first_tokens_of_low_confidence_are_handed_off_and_never_released() -> None:
    attempt = new_attempt(HANDOFF)
    attempt.receive(chunk_of("a", score=0.9), 101.0)
    attempt.receive(chunk_of("b", score=0.9), 101.0)
    with pytest.raises(LowConfidence) as caught:
        attempt.receive(chunk_of("c", score=0.49), 102.0)
    assert attempt.state is AttemptState.HANDED_OFF
    attempt.fail(caught.value, 102.0)  # what a service does with every error
    record = attempt.record(103.0)
    assert (record.state, record.error, record.tokens) == ("handed_off", "low_confidence", 3)
    assert record.detail == "confidence 0.490 below 0.5"
    assert record.confidence == confidence_of(0.49, 1)
    assert not attempt.committed
    assert attempt.held == []


def test_confidence_at_the_threshold_is_enough() -> None:
    attempt = new_attempt(HANDOFF)
    assert attempt.receive(chunk_of("abc", tokens=3, score=0.5), 101.0) != ()


@pytest.mark.parametrize(("score", "released"), [(0.9, True), (0.1, False)])
def test_an_answer_that_ends_early_is_decided_at_its_end(score: float, released: bool) -> None:
    attempt = new_attempt(HANDOFF)
    first = chunk_of("a", score=score)
    attempt.receive(first, 101.0)
    if released:
        assert attempt.receive(end_chunk(), 102.0) == (first, end_chunk())
        attempt.finish(102.0)
        assert attempt.state is AttemptState.DONE
    else:
        with pytest.raises(LowConfidence):
            attempt.receive(end_chunk(), 102.0)
        assert attempt.state is AttemptState.HANDED_OFF


def test_without_any_confidence_the_answer_is_kept_and_the_record_says_so() -> None:
    attempt = new_attempt(HANDOFF)
    for text in "abc":
        attempt.receive(chunk_of(text), 101.0)
    assert attempt.state is AttemptState.COMMITTED
    assert attempt.record(102.0).detail == "no confidence reported: kept"


def test_only_the_first_choice_decides_and_all_are_held() -> None:
    """With n = 2 the chunks of the other choice wait, and its tokens do not count."""
    attempt = new_attempt(HANDOFF, choices=2)
    others = tuple(chunk_of("z", index=1) for _ in range(5))
    for other in others:
        assert attempt.receive(other, 101.0) == ()
    mine = chunk_of("abc", tokens=3, score=0.9)
    assert attempt.receive(mine, 102.0) == (*others, mine)


def test_a_confident_answer_for_a_client_that_does_not_stream_is_collected() -> None:
    attempt = new_attempt(HANDOFF, stream=False)
    assert attempt.receive(chunk_of("abc", tokens=3, score=0.9), 101.0) == ()
    assert attempt.state is AttemptState.COLLECTING
    attempt.receive(end_chunk(), 102.0)
    assert len(attempt.finish(103.0)) == 2


def test_held_tokens_are_decided_by_the_first_one_after_their_time() -> None:
    """The time counts from the first token, not from the request, and an empty chunk does not start it."""
    for score, expected in ((0.9, "commit"), (0.1, "hand_off")):
        gate = HandoffGate(Handoff(after_tokens=8, below=0.5, within_s=0.7))
        assert gate.observe(chunk_of(tokens=0), now=5.0) == "wait"
        assert gate.observe(chunk_of(tokens=1, score=score), now=10.0) == "wait"
        assert gate.observe(chunk_of(tokens=1, score=score), now=10.6) == "wait"
        assert gate.observe(chunk_of(tokens=1, score=score), now=10.75) == expected


@given(
    st.lists(st.tuples(st.integers(0, 4), st.none() | st.floats(0, 1)), min_size=1, max_size=12),
    st.integers(1, 8),
    st.floats(0.01, 1),
)
def test_the_gate_decides_once_and_by_the_latest_confidence(
    steps: list[tuple[int, float | None]], after: int, below: float
) -> None:
    gate = HandoffGate(Handoff(after, below))
    tokens, latest = 0, None
    for count, score in steps:
        tokens += count
        latest = latest if score is None else score
        verdict = gate.observe(chunk_of(tokens=count, score=score), now=0.0)
        if tokens < after:
            assert verdict == "wait"
            continue
        assert verdict == ("hand_off" if latest is not None and latest < below else "commit")
        break
