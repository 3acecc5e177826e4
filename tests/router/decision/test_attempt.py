"""One attempt: its table, which chunks are held back and released, and the record of each ending."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.decision.attempts import TABLE, Attempt, AttemptEvent, AttemptState, IllegalTransition
from router.decision.handoff import HandoffGate
from router.errors import ClientGone, CloudTimeout, DeadlineExceeded, EngineCrashed, LowConfidence, StreamBroken
from router.types import AttemptPlan, Chunk, Handoff, Target, ToolCallDelta, Usage
from tests.router.sample_requests import last, piece, sure

SMALL = Target("small", "edge", "assistant")
UNSURE = Handoff(after_tokens=3, below=0.5)
ENDED = {
    AttemptState.DONE,
    AttemptState.FAILED,
    AttemptState.HANDED_OFF,
    AttemptState.CANCELLED,
    AttemptState.TIMED_OUT,
}


def attempt(handoff: Handoff | None = None, *, stream: bool = True, choices: int = 1, started: bool = True) -> Attempt:
    made = Attempt(AttemptPlan(SMALL, handoff), stream=stream, choices=choices, arrived=100.0)
    if started:
        made.start(100.5)
    return made


# --- the table -------------------------------------------------------------------------------------------------------


def test_every_state_has_a_row_and_final_states_are_final() -> None:
    assert set(TABLE) == set(AttemptState)
    assert {state for state, row in TABLE.items() if not row} == ENDED


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
    for state in set(AttemptState) - ENDED:
        assert {AttemptEvent.ERROR, AttemptEvent.CANCEL, AttemptEvent.DEADLINE} <= set(TABLE[state])


@pytest.mark.parametrize(
    ("state", "event"), [p for p in itertools.product(AttemptState, AttemptEvent) if p[1] not in TABLE[p[0]]]
)
def test_a_missing_key_is_an_illegal_transition(state: AttemptState, event: AttemptEvent) -> None:
    one = attempt(started=False)
    one.state = state
    with pytest.raises(IllegalTransition, match=f"{event.value} in state {state.value}"):
        one.transition(event, 101.0)
    assert one.state is state


# --- a stream without handoff ----------------------------------------------------------------------------------------


def test_a_stream_is_released_chunk_by_chunk() -> None:
    one = attempt()
    first, second = piece("a"), piece("b")
    assert one.state is AttemptState.WAITING
    assert one.receive(first, 101.0) == (first,)
    assert one.state is AttemptState.COMMITTED
    assert one.receive(second, 102.0) == (second,)
    assert one.receive(last(), 102.5) == (last(),)
    assert one.finish(103.0) == ()
    assert one.state is AttemptState.DONE
    record = one.record(104.0)
    assert (record.state, record.tokens, record.error) == ("done", 2, "")
    assert (record.started_ms, record.ttft_ms, record.duration_ms) == (500.0, 500.0, 2500.0)


def test_a_stream_that_stops_before_its_end_is_broken() -> None:
    one = attempt()
    one.receive(piece(), 101.0)
    with pytest.raises(StreamBroken) as caught:
        one.finish(102.0)
    one.fail(caught.value, 102.0)
    assert one.state is AttemptState.FAILED
    assert one.committed
    assert one.record(103.0).error == "stream_broken"


def test_every_choice_must_have_its_end() -> None:
    one = attempt(choices=2)
    one.receive(piece(index=1), 101.0)
    one.receive(last(index=1), 101.0)
    with pytest.raises(StreamBroken):
        one.finish(102.0)
    one.receive(last(index=0), 102.0)
    one.finish(102.0)
    assert one.state is AttemptState.DONE


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
    one = attempt(UNSURE if moment == "holding" else None, stream=moment != "collecting", started=moment != "pending")
    if moment in ("holding", "collecting", "committed"):
        one.receive(piece(), 101.0)
    assert one.state.value == moment
    one.fail(error, 102.0)  # type: ignore[arg-type]
    assert one.state is state
    assert one.committed == (moment == "committed")
    assert one.record(103.0).error == error.code  # type: ignore[attr-defined]
    assert one.held == ()


# --- the whole answer at once ----------------------------------------------------------------------------------------


def test_a_whole_answer_is_collected_and_released_at_its_end() -> None:
    """So a late failure can still be answered by the next target."""
    one = attempt(stream=False)
    pieces = (piece("a"), piece("b"), last(), Chunk(usage=Usage(3, 2)))
    for one_piece in pieces:
        assert one.receive(one_piece, 101.0) == ()
        assert not one.committed
    assert one.state is AttemptState.COLLECTING
    assert one.finish(102.0) == pieces
    assert one.state is AttemptState.DONE
    assert one.committed


def test_an_empty_answer_with_an_end_is_an_answer() -> None:
    one = attempt()
    assert one.receive(last(), 101.0) == (last(),)
    one.finish(101.0)
    assert one.state is AttemptState.DONE
    assert one.record(102.0).ttft_ms is None


def test_an_embedding_commits_and_ends_at_once() -> None:
    one = attempt()
    one.complete(102.0)
    assert (one.state, one.committed, one.ended) == (AttemptState.DONE, True, True)


def test_a_tool_call_counts_as_the_first_token() -> None:
    one = attempt()
    one.receive(Chunk(), 101.0)
    one.receive(Chunk(tool_calls=(ToolCallDelta(0, id="c", name="f"),)), 102.0)
    assert one.record(103.0).ttft_ms == 1500.0


# --- holding back ----------------------------------------------------------------------------------------------------


def test_first_tokens_are_held_until_their_confidence_is_known() -> None:
    one = attempt(UNSURE)
    held = [piece("a", score=0.1), piece("b", score=0.3)]
    assert [one.receive(p, 101.0) for p in held] == [(), ()]
    assert one.state is AttemptState.HOLDING
    third = piece("c", score=0.9)
    assert one.receive(third, 102.0) == (*held, third)
    assert one.state is AttemptState.COMMITTED
    later = piece("d", score=0.0)
    assert one.receive(later, 103.0) == (later,)
    assert one.record(104.0).tokens == 4


def test_first_tokens_of_low_confidence_are_handed_off_and_never_released() -> None:
    one = attempt(UNSURE)
    one.receive(piece("a", score=0.9), 101.0)
    one.receive(piece("b", score=0.9), 101.0)
    with pytest.raises(LowConfidence) as caught:
        one.receive(piece("c", score=0.49), 102.0)
    assert one.state is AttemptState.HANDED_OFF
    one.fail(caught.value, 102.0)  # what a service does with every error
    record = one.record(103.0)
    assert (record.state, record.error, record.tokens) == ("handed_off", "low_confidence", 3)
    assert record.detail == "confidence 0.490 below 0.5"
    assert record.confidence == sure(0.49, 1)
    assert not one.committed
    assert one.held == ()


def test_confidence_at_the_threshold_is_enough() -> None:
    one = attempt(UNSURE)
    assert one.receive(piece("abc", tokens=3, score=0.5), 101.0) != ()


@pytest.mark.parametrize(("score", "released"), [(0.9, True), (0.1, False)])
def test_an_answer_that_ends_early_is_decided_at_its_end(score: float, released: bool) -> None:
    one = attempt(UNSURE)
    first = piece("a", score=score)
    one.receive(first, 101.0)
    if released:
        assert one.receive(last(), 102.0) == (first, last())
        one.finish(102.0)
        assert one.state is AttemptState.DONE
    else:
        with pytest.raises(LowConfidence):
            one.receive(last(), 102.0)
        assert one.state is AttemptState.HANDED_OFF


def test_without_any_confidence_the_answer_is_kept_and_the_record_says_so() -> None:
    one = attempt(UNSURE)
    for text in "abc":
        one.receive(piece(text), 101.0)
    assert one.state is AttemptState.COMMITTED
    assert one.record(102.0).detail == "no confidence reported: kept"


def test_only_the_first_choice_decides_and_all_are_held() -> None:
    """With n = 2 the chunks of the other choice wait, and its tokens do not count."""
    one = attempt(UNSURE, choices=2)
    others = tuple(piece("z", index=1) for _ in range(5))
    for other in others:
        assert one.receive(other, 101.0) == ()
    mine = piece("abc", tokens=3, score=0.9)
    assert one.receive(mine, 102.0) == (*others, mine)


def test_a_confident_answer_for_a_client_that_does_not_stream_is_collected() -> None:
    one = attempt(UNSURE, stream=False)
    assert one.receive(piece("abc", tokens=3, score=0.9), 101.0) == ()
    assert one.state is AttemptState.COLLECTING
    one.receive(last(), 102.0)
    assert len(one.finish(103.0)) == 2


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
        verdict = gate.observe(piece(tokens=count, score=score))
        if tokens < after:
            assert verdict == "wait"
            continue
        assert verdict == ("hand_off" if latest is not None and latest < below else "commit")
        break
