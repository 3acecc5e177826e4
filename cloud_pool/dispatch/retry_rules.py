"""May an ask that failed before its first delta be tried on another endpoint? Pure; one line for each class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from router.errors import (
    BreakerOpen,
    CausewayError,
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

_VERDICTS: Mapping[type[CausewayError], RetryRule] = {
    # The endpoint's own state; the next one has another. StubDead is an EngineUnavailable.
    EngineUnavailable: "again",
    EngineOutOfMemory: "again",
    QueueFull: "again",
    CloudSaturated: "again",
    Draining: "again",
    BreakerOpen: "again",
    CloudUnreachable: "again",
    # It broke while it worked on this very ask: that may be the ask's doing, and must not go round the whole pool.
    EngineCrashed: "once",
    StreamBroken: "once",
    CloudFailed: "once",
    # All others, above all: InvalidRequest and CloudRejected (wrong everywhere), DeadlineExceeded, EngineTimeout and
    # CloudTimeout (no time is left), RateLimited and what else is about the caller.
}


def retry_rule(error: CausewayError) -> RetryRule:
    """A subclass is judged as its nearest listed ancestor; a class that nobody thought of is never tried again."""
    if isinstance(error, CloudUnreachable) and error.phase != "connect":
        return "once"  # Not refused, but lost: the server may have died of it.
    for kind in type(error).__mro__:
        if kind in _VERDICTS:
            return _VERDICTS[kind]
    return "never"


class RetryState:
    """What became of one ask so far. Decides whether another try may follow, and where it must not go."""

    def __init__(self, most: int) -> None:
        self.tries = 0
        self.tried: set[str] = set()
        self._most = most
        self._doubts = 0  # errors that may be the ask's own fault

    def begin_attempt(self, endpoint: str) -> None:
        self.tries += 1
        self.tried.add(endpoint)

    def may_retry(self, errors: list[CausewayError]) -> bool:
        """After a round that ended with these errors, at least one."""
        verdicts = [retry_rule(error) for error in errors]
        self._doubts += verdicts.count("once")
        return "never" not in verdicts and self._doubts <= 1 and self.tries < self._most
