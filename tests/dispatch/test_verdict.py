"""Which errors may be tried again elsewhere: decided for each class, and for each class on purpose."""

from __future__ import annotations

import pytest

import cloud_pool.faults
import router.errors
from cloud_pool.dispatch.verdict import Course, Verdict, verdict
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
    cloud_pool.faults.StubDead,
    EngineOutOfMemory,
    QueueFull,
    CloudSaturated,
    Draining,
    BreakerOpen,
    CloudUnreachable,
}
ONCE = {EngineCrashed, StreamBroken, CloudFailed}


def classes() -> set[type[CausewayError]]:
    modules = (router.errors, cloud_pool.faults)
    found = {one for module in modules for one in vars(module).values() if isinstance(one, type)}
    return {one for one in found if issubclass(one, CausewayError)}


def made(kind: type[CausewayError], phase: Phase = "connect") -> CausewayError:
    return kind("broken", phase=phase) if issubclass(kind, BackendError) else kind("broken")


@pytest.mark.parametrize("kind", sorted(classes(), key=lambda kind: kind.__name__))
def test_each_class(kind: type[CausewayError]) -> None:
    """What is not listed as worth another try is never tried again."""
    expected: Verdict = "again" if kind in AGAIN else "once" if kind in ONCE else "never"
    assert verdict(made(kind)) == expected


def test_all_classes_were_looked_at() -> None:
    """Otherwise the test above could not fail."""
    assert len(classes()) >= 30
    assert classes() > AGAIN | ONCE


@pytest.mark.parametrize("phase", ["send", "first_token", "stream"])
def test_a_server_that_was_lost_while_it_worked(phase: Phase) -> None:
    """Refused is harmless; lost may be the ask's own doing, and is tried on one more server only."""
    assert verdict(CloudUnreachable("lost", phase=phase)) == "once"


@pytest.mark.parametrize("kind", [*sorted(ONCE, key=lambda kind: kind.__name__)])
def test_a_poisonous_ask_meets_two_servers_at_most(kind: type[CausewayError]) -> None:
    """After the second error that may be the ask's own fault it ends, however many tries are left."""
    course = Course(10)
    course.trying("a")
    assert course.may_go_on([made(kind)])
    course.trying("b")
    assert not course.may_go_on([made(kind)])


def test_a_round_with_two_errors_is_judged_by_both() -> None:
    """One hopeless error, or two doubtful ones, end it."""
    assert not Course(10).may_go_on([QueueFull("full"), DeadlineExceeded("over")])
    assert not Course(10).may_go_on([InvalidRequest("bad"), QueueFull("full")])
    assert not Course(10).may_go_on([CloudFailed("raised"), CloudFailed("raised")])
    assert Course(10).may_go_on([CloudFailed("raised"), QueueFull("full")])


def test_tries_are_counted() -> None:
    """The last try that is allowed has no follower."""
    course = Course(2)
    course.trying("a")
    assert course.may_go_on([QueueFull("full")])
    course.trying("b")
    assert not course.may_go_on([QueueFull("full")])
    assert course.tried == {"a", "b"}
