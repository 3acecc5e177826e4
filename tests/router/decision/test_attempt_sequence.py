"""The order of attempts: which comes next, and the client's error when none is left."""

from __future__ import annotations

import msgspec
import pytest

from causeway_server.router.decision.abilities import no_route
from causeway_server.router.decision.attempts import AttemptSequence, AttemptState, final_error
from causeway_server.router.decision.decide import decide
from causeway_server.router.errors import (
    AllAttemptsFailed,
    BackendError,
    BreakerOpen,
    CausewayError,
    ClientGone,
    CloudRejected,
    CloudSaturated,
    CloudTimeout,
    CloudUnreachable,
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineCrashed,
    InvalidGrammar,
    InvalidRequest,
    LowConfidence,
    QueueFull,
    TargetNotConfigured,
    UnsupportedFeature,
)
from causeway_server.router.policy.compiled import parse_policy
from causeway_server.router.types import AttemptPlan, Decision, Estimates, Handoff, Request, Snapshot, Target
from tests.router.sample_requests import chat, chunk_of, end_chunk, kiosk

SMALL = Target("small", "edge", "assistant")
LARGE = Target("large", "cloud", "assistant-large")
HANDOFF = Handoff(after_tokens=1, below=0.5)


def new_sequence(*plans: AttemptPlan, stream: bool = True) -> AttemptSequence:
    return AttemptSequence(Decision("p", "r", "rule", plans), stream=stream, arrived=0.0)


def fail(sequence: AttemptSequence, error: CausewayError) -> str:
    attempt = sequence.next_attempt()
    assert attempt is not None
    attempt.start(1.0)
    attempt.fail(error, 2.0)
    return sequence.next_step(error)


def hand_off(sequence: AttemptSequence) -> str:
    attempt = sequence.next_attempt()
    assert attempt is not None
    attempt.start(1.0)
    with pytest.raises(LowConfidence) as caught:
        attempt.receive(chunk_of(score=0.1), 2.0)
    attempt.fail(caught.value, 2.0)
    return sequence.next_step(caught.value)


def answer(sequence: AttemptSequence) -> None:
    attempt = sequence.next_attempt()
    assert attempt is not None
    attempt.start(1.0)
    attempt.receive(chunk_of(score=0.9), 2.0)
    attempt.receive(end_chunk(), 2.0)
    attempt.finish(3.0)


RETRYABLE = [
    EngineCrashed("x"),
    CloudUnreachable("x"),
    CloudTimeout("x"),
    CloudSaturated("x"),
    CloudRejected("x"),
    BreakerOpen("x"),
    QueueFull("x"),
    LowConfidence("x"),
    BackendError("x"),
]
HERE_ONLY: list[CausewayError] = [ContextLengthExceeded("x"), UnsupportedFeature("x"), InvalidGrammar("x")]
FINAL = [InvalidRequest("x"), DeadlineExceeded("x"), ClientGone("x"), CausewayError("x")]


@pytest.mark.parametrize("error", RETRYABLE + HERE_ONLY, ids=lambda e: type(e).__name__)
def test_a_fault_of_the_target_goes_to_the_next_before_commit_only(error: CausewayError) -> None:
    sequence = new_sequence(AttemptPlan(SMALL), AttemptPlan(LARGE))
    assert fail(sequence, error) == "next"
    assert fail(sequence, error) == "raise"
    sequence = new_sequence(AttemptPlan(SMALL), AttemptPlan(LARGE))
    answer(sequence)
    assert sequence.next_step(error) == "raise"


@pytest.mark.parametrize("error", FINAL, ids=lambda e: type(e).__name__)
def test_an_invalid_request_a_deadline_and_a_disconnect_end_the_sequence(error: CausewayError) -> None:
    assert fail(new_sequence(AttemptPlan(SMALL), AttemptPlan(LARGE)), error) == "raise"


def test_the_attempts_come_in_the_decisions_order() -> None:
    sequence = new_sequence(AttemptPlan(SMALL), AttemptPlan(LARGE))
    assert fail(sequence, EngineCrashed("x")) == "next"
    answer(sequence)
    assert sequence.next_attempt() is None
    assert [a.plan.target.name for a in sequence.attempts] == ["small", "large"]
    assert sequence.degraded
    assert [r.state for r in sequence.records(5.0)] == ["failed", "done"]


def test_an_answer_in_place_of_a_target_that_is_down_is_degraded() -> None:
    """If the target that is down answers after all, the answer is not degraded."""
    decision = Decision("p", "r", "otherwise", (AttemptPlan(SMALL), AttemptPlan(LARGE)), skipped_target="large")
    other = AttemptSequence(decision, stream=True, arrived=0.0)
    answer(other)
    assert other.degraded
    first_choice = AttemptSequence(
        msgspec.structs.replace(decision, attempts=(AttemptPlan(LARGE),)), stream=True, arrived=0.0
    )
    answer(first_choice)
    assert not first_choice.degraded


def test_an_answer_after_a_handoff_is_not_degraded() -> None:
    sequence = new_sequence(AttemptPlan(SMALL, HANDOFF), AttemptPlan(LARGE), AttemptPlan(SMALL))
    assert hand_off(sequence) == "next"
    answer(sequence)
    assert not sequence.degraded
    assert [r.state for r in sequence.records(5.0)] == ["handed_off", "done"]


def test_if_all_targets_after_a_handoff_fail_the_first_one_answers_after_all() -> None:
    """The answer of low confidence is marked degraded."""
    sequence = new_sequence(AttemptPlan(SMALL, HANDOFF), AttemptPlan(LARGE), AttemptPlan(SMALL))
    assert hand_off(sequence) == "next"
    assert fail(sequence, CloudUnreachable("x")) == "next"
    answer(sequence)
    assert sequence.degraded
    assert [r.state for r in sequence.records(5.0)] == ["handed_off", "failed", "done"]


def test_a_target_that_failed_is_not_tried_again_as_last_resort() -> None:
    sequence = new_sequence(AttemptPlan(SMALL, HANDOFF), AttemptPlan(LARGE), AttemptPlan(SMALL))
    assert fail(sequence, EngineCrashed("x")) == "next"
    error = CloudUnreachable("y")
    assert fail(sequence, error) == "raise"
    assert sequence.next_attempt() is None
    assert isinstance(final_error(sequence.attempts, error), AllAttemptsFailed)


def test_a_committed_attempt_is_the_last_one() -> None:
    sequence = new_sequence(AttemptPlan(SMALL), AttemptPlan(LARGE))
    attempt = sequence.next_attempt()
    assert attempt is not None
    attempt.start(1.0)
    attempt.receive(chunk_of(), 2.0)
    error = EngineCrashed("x", phase="stream")
    attempt.fail(error, 3.0)
    assert sequence.next_step(error) == "raise"
    assert final_error(sequence.attempts, error) is error


def test_a_whole_answer_that_breaks_is_made_by_the_next_target() -> None:
    """A client that does not stream has no bytes yet."""
    sequence = new_sequence(AttemptPlan(LARGE), AttemptPlan(SMALL), stream=False)
    attempt = sequence.next_attempt()
    assert attempt is not None
    attempt.start(1.0)
    attempt.receive(chunk_of(), 2.0)
    error = CloudTimeout("x", phase="stream")
    attempt.fail(error, 3.0)
    assert sequence.next_step(error) == "next"


def test_the_last_error_has_every_attempts_reason() -> None:
    sequence = new_sequence(AttemptPlan(LARGE), AttemptPlan(SMALL))
    fail(sequence, CloudSaturated("busy.", retry_after_s=7.0))
    error = EngineCrashed("killed", retry_after_s=2.0)
    fail(sequence, error)
    final = final_error(sequence.attempts, error)
    assert isinstance(final, AllAttemptsFailed)
    assert final.message == "Every attempt failed: large: cloud_saturated (busy); small: engine_crashed (killed)."
    assert final.retry_after_s == 2.0


def test_saturation_everywhere_is_429_with_a_wait() -> None:
    sequence = new_sequence(AttemptPlan(LARGE), AttemptPlan(SMALL))
    fail(sequence, CloudSaturated("busy"))
    error = QueueFull("full", retry_after_s=3.0)
    fail(sequence, error)
    final = final_error(sequence.attempts, error)
    assert (final.status, final.retry_after_s) == (429, 3.0)


def test_a_prompt_too_long_for_all_targets_is_400() -> None:
    sequence = new_sequence(AttemptPlan(SMALL), AttemptPlan(LARGE))
    assert fail(sequence, ContextLengthExceeded("9000 > 2048")) == "next"
    error = ContextLengthExceeded("9000 > 4096")
    assert fail(sequence, error) == "raise"
    final = final_error(sequence.attempts, error)
    assert isinstance(final, ContextLengthExceeded)
    assert final.message == "small: 9000 > 2048 large: 9000 > 4096"


def test_a_target_that_this_device_lacks_does_not_make_a_refusal_a_503() -> None:
    """No later time makes the prompt fit."""
    sequence = new_sequence(AttemptPlan(SMALL), AttemptPlan(LARGE))
    error = ContextLengthExceeded("9000 > 2048")
    assert fail(sequence, error) == "next"
    absent = TargetNotConfigured("large: `clouds` is empty on this device", phase="connect")
    assert fail(sequence, absent) == "raise"
    assert final_error(sequence.attempts, absent) is error


def test_a_prompt_too_long_for_the_device_does_not_degrade_the_answer() -> None:
    sequence = new_sequence(AttemptPlan(SMALL), AttemptPlan(LARGE))
    fail(sequence, ContextLengthExceeded("9000 > 2048"))
    answer(sequence)
    assert not sequence.degraded


def test_a_deadline_is_504_whatever_failed_before() -> None:
    sequence = new_sequence(AttemptPlan(SMALL), AttemptPlan(LARGE))
    fail(sequence, EngineCrashed("x"))
    error = DeadlineExceeded("late")
    assert fail(sequence, error) == "raise"
    assert final_error(sequence.attempts, error) is error
    assert sequence.attempts[-1].state is AttemptState.TIMED_OUT


EU, US, AP = (AttemptPlan(Target("large", "cloud", "m", cloud=name)) for name in ("eu", "us", "ap"))


def test_a_target_whose_breaker_refused_it_is_tried_again_after_another_took_its_time() -> None:
    """Another request's trial may have closed the breaker meanwhile; one that refused just now is not asked again."""
    sequence = new_sequence(EU, US, AP)
    assert fail(sequence, BreakerOpen("open")) == "next"
    assert fail(sequence, CloudTimeout("late")) == "next"
    assert fail(sequence, BreakerOpen("open")) == "next"
    answer(sequence)
    assert [attempt.plan.target.cloud for attempt in sequence.attempts] == ["eu", "us", "ap", "eu"]
    assert not sequence.degraded


def test_a_breaker_that_stays_open_is_asked_twice_at_most() -> None:
    sequence = new_sequence(EU, US)
    for error in (BreakerOpen("open"), CloudTimeout("late")):
        assert fail(sequence, error) == "next"
    assert fail(sequence, BreakerOpen("open")) == "raise"


@pytest.mark.parametrize("errors", [[BreakerOpen("open")] * 2, [CloudTimeout("late"), BreakerOpen("open")]])
def test_breakers_that_refused_just_now_are_not_asked_again(errors: list[CausewayError]) -> None:
    sequence = new_sequence(EU, US)
    assert [fail(sequence, error) for error in errors] == ["next", "raise"]


def test_without_a_route_the_error_names_what_excluded_each_target() -> None:
    decision = decide(kiosk(), chat(tags=("private",), prefer="only_cloud"), Snapshot(), Estimates(prompt_tokens=5))
    assert AttemptSequence(decision, stream=True, arrived=0.0).next_attempt() is None
    error = no_route(decision)
    assert error.status == 503
    assert "small (preference_excluded: only_cloud)" in error.message
    assert "large (constraint_excluded: private-stays)" in error.message


def test_a_model_that_cannot_is_refused_with_those_that_can() -> None:
    """`up` gives embeddings to one target only, because vectors of two models cannot be compared."""
    policy = parse_policy(
        "version: 1\nname: p\ntargets:\n  small: {at: edge, model: a, can: [chat, embedding]}\n"
        "  large: {at: cloud, model: b}\nroutes: [{name: r, use: [small, large]}]\n"
    )
    request = Request(kind="embedding", model="large", prompts=("x",))
    error = no_route(decide(policy, request, Snapshot(), Estimates()))
    assert (error.status, error.param) == (400, "model")
    assert "`large` does not support embeddings under policy p@" in error.message
    assert "Send `small` as `model`, or `auto`; or add `can: [embedding]` to the target" in error.message


def test_no_route_that_holds_says_so() -> None:
    assert "no route of the policy holds" in no_route(Decision("p", "r", "", ())).message
