"""Whether a request that failed before its first delta may be retried on another endpoint. Pure; a line per class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from router.errors import (
    BreakerOpen,
    CausewayError,
    CloudDisconnected,
    CloudFailed,
    CloudSaturated,
    CloudUnreachable,
    Draining,
    EngineCrashed,
    EngineOutOfMemory,
    EngineUnavailable,
    QueueFull,
    StreamBroken,
)

RetryRule = Literal["again", "once", "never"]

_RULES: Mapping[type[CausewayError], RetryRule] = {
    # The endpoint's own state, which the next endpoint does not share. StubProcessDied is an EngineUnavailable.
    EngineUnavailable: "again",
    EngineOutOfMemory: "again",
    QueueFull: "again",
    CloudSaturated: "again",
    Draining: "again",
    BreakerOpen: "again",
    CloudUnreachable: "again",
    # The endpoint broke while it worked on this very request. The request may be the cause, and must not go round the
    # whole pool.
    EngineCrashed: "once",
    StreamBroken: "once",
    CloudFailed: "once",
    CloudDisconnected: "once",
    # All others are never retried, above all InvalidRequest and CloudRejected (wrong everywhere), DeadlineExceeded,
    # EngineTimeout and CloudTimeout (no time is left), RateLimited and other errors about the caller.
}


def retry_rule(error: CausewayError) -> RetryRule:
    """Return the rule of the nearest listed ancestor; an unlisted class is never retried."""
    if isinstance(error, CloudUnreachable) and error.phase != "connect":
        return "once"  # Not refused, but lost: this request may have killed the server.
    for ancestor in type(error).__mro__:
        if ancestor in _RULES:
            return _RULES[ancestor]
    return "never"


class RetryState:
    """The attempts of one request so far. Decides whether another one may follow, and which endpoints to avoid."""

    def __init__(self, max_attempts: int) -> None:
        self.attempts = 0
        self.tried: set[str] = set()
        self._max_attempts = max_attempts
        self._suspicions = 0  # errors that the request itself may have caused

    def begin_attempt(self, endpoint: str) -> None:
        self.attempts += 1
        self.tried.add(endpoint)

    def may_retry(self, error: CausewayError) -> bool:
        """Tell whether another attempt may follow one that ended with this error."""
        rule = retry_rule(error)
        self._suspicions += rule == "once"
        return rule != "never" and self._suspicions <= 1 and self.attempts < self._max_attempts
