"""Which errors may be retried elsewhere, decided for each class on purpose."""

from __future__ import annotations

import pytest

import causeway_server.cloud_pool.upstreams.triton.errors
import causeway_server.router.errors
from causeway_server.cloud_pool.dispatch.dispatcher import RetryRule, RetryState, retry_rule
from causeway_server.router.errors import (
    BackendError,
    BreakerOpen,
    CausewayError,
    CloudDisconnected,
    CloudFailed,
    CloudSaturated,
    CloudUnreachable,
    CloudUnreadable,
    Draining,
    EngineCrashed,
    EngineOutOfMemory,
    EngineUnavailable,
    Phase,
    QueueFull,
    StreamBroken,
)

AGAIN = {
    EngineUnavailable,
    causeway_server.cloud_pool.upstreams.triton.errors.StubProcessDied,
    EngineOutOfMemory,
    QueueFull,
    CloudSaturated,
    Draining,
    BreakerOpen,
    CloudUnreachable,
}
ONCE = {EngineCrashed, StreamBroken, CloudFailed, CloudUnreadable, CloudDisconnected}


def classes() -> list[type[CausewayError]]:
    """Every error class, by name."""
    modules = (causeway_server.router.errors, causeway_server.cloud_pool.upstreams.triton.errors)
    found = {one for module in modules for one in vars(module).values() if isinstance(one, type)}
    errors: list[type[CausewayError]] = [one for one in found if issubclass(one, CausewayError)]
    return sorted(errors, key=lambda kind: kind.__name__)


def made(kind: type[CausewayError], phase: Phase = "connect") -> CausewayError:
    return kind("broken", phase=phase) if issubclass(kind, BackendError) else kind("broken")


@pytest.mark.parametrize("kind", classes())
def test_the_rule_of_each_error_class(kind: type[CausewayError]) -> None:
    expected: RetryRule = "again" if kind in AGAIN else "once" if kind in ONCE else "never"
    assert retry_rule(made(kind)) == expected


def test_all_error_classes_are_imported() -> None:
    """Otherwise the test above could not fail."""
    assert len(classes()) >= 30
    assert set(classes()) > AGAIN | ONCE


@pytest.mark.parametrize("phase", ["send", "first_token", "stream"])
def test_a_lost_connection_is_retried_once_a_refused_one_again(phase: Phase) -> None:
    assert retry_rule(CloudUnreachable("lost", phase=phase)) == "once"


@pytest.mark.parametrize("kind", [*sorted(ONCE, key=lambda kind: kind.__name__)])
def test_a_suspicious_request_reaches_two_servers_at_most(kind: type[CausewayError]) -> None:
    retry_state = RetryState(10)
    retry_state.begin_attempt("a")
    assert retry_state.may_retry(made(kind))
    retry_state.begin_attempt("b")
    assert not retry_state.may_retry(made(kind))


def test_the_last_allowed_attempt_is_not_retried() -> None:
    retry_state = RetryState(2)
    retry_state.begin_attempt("a")
    assert retry_state.may_retry(QueueFull("full"))
    retry_state.begin_attempt("b")
    assert not retry_state.may_retry(QueueFull("full"))
    assert retry_state.tried == {"a", "b"}
