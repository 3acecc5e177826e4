"""Which errors may be tried again elsewhere: decided for each class, and for each class on purpose."""

from __future__ import annotations

import pytest

import cloud_pool.upstreams.triton.errors
import router.errors
from cloud_pool.dispatch.retry_rules import RetryRule, RetryState, retry_rule
from router.errors import (
    BackendError,
    BreakerOpen,
    CausewayError,
    CloudFailed,
    CloudSaturated,
    CloudUnreachable,
    DeadlineExceeded,
    Draining,
    EngineCrashed,
    EngineOutOfMemory,
    EngineUnavailable,
    InvalidRequest,
    Phase,
    QueueFull,
    StreamBroken,
)

AGAIN = {
    EngineUnavailable,
    cloud_pool.upstreams.triton.errors.StubProcessDied,
    EngineOutOfMemory,
    QueueFull,
    CloudSaturated,
    Draining,
    BreakerOpen,
    CloudUnreachable,
}
ONCE = {EngineCrashed, StreamBroken, CloudFailed}


def classes() -> set[type[CausewayError]]:
    modules = (router.errors, cloud_pool.upstreams.triton.errors)
    found = {one for module in modules for one in vars(module).values() if isinstance(one, type)}
    return {one for one in found if issubclass(one, CausewayError)}


def made(kind: type[CausewayError], phase: Phase = "connect") -> CausewayError:
    return kind("broken", phase=phase) if issubclass(kind, BackendError) else kind("broken")


@pytest.mark.parametrize("kind", sorted(classes(), key=lambda kind: kind.__name__))
def test_each_class(kind: type[CausewayError]) -> None:
    """What is not listed as worth another try is never tried again."""
    expected: RetryRule = "again" if kind in AGAIN else "once" if kind in ONCE else "never"
    assert retry_rule(made(kind)) == expected


def test_all_classes_were_looked_at() -> None:
    """Otherwise the test above could not fail."""
    assert len(classes()) >= 30
    assert classes() > AGAIN | ONCE


@pytest.mark.parametrize("phase", ["send", "first_token", "stream"])
def test_a_server_that_was_lost_while_it_worked(phase: Phase) -> None:
    """Refused is harmless; lost may be the ask's own doing, and is tried on one more server only."""
    assert retry_rule(CloudUnreachable("lost", phase=phase)) == "once"


@pytest.mark.parametrize("kind", [*sorted(ONCE, key=lambda kind: kind.__name__)])
def test_a_poisonous_ask_meets_two_servers_at_most(kind: type[CausewayError]) -> None:
    """After the second error that may be the ask's own fault it ends, however many tries are left."""
    retry_state = RetryState(10)
    retry_state.begin_attempt("a")
    assert retry_state.may_retry([made(kind)])
    retry_state.begin_attempt("b")
    assert not retry_state.may_retry([made(kind)])


def test_a_round_with_two_errors_is_judged_by_both() -> None:
    """One hopeless error, or two doubtful ones, end it."""
    assert not RetryState(10).may_retry([QueueFull("full"), DeadlineExceeded("over")])
    assert not RetryState(10).may_retry([InvalidRequest("bad"), QueueFull("full")])
    assert not RetryState(10).may_retry([CloudFailed("raised"), CloudFailed("raised")])
    assert RetryState(10).may_retry([CloudFailed("raised"), QueueFull("full")])


def test_tries_are_counted() -> None:
    """The last try that is allowed has no follower."""
    retry_state = RetryState(2)
    retry_state.begin_attempt("a")
    assert retry_state.may_retry([QueueFull("full")])
    retry_state.begin_attempt("b")
    assert not retry_state.may_retry([QueueFull("full")])
    assert retry_state.tried == {"a", "b"}
