"""The cloud's health as requests and probes notice it: reachable, token accepted, circuit breaker.

Each change is logged once, whichever request or probe notices it first; `problems` lists what is wrong now.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import aiohttp
from yarl import URL

from router.trackers import Breaker

from ...observability.logs import Fault

log = logging.getLogger(__name__)


class CloudHealth:
    """Owns the circuit breaker.

    Args:
        url: of the server; only its host and port are logged.
        breaker: the circuit breaker.
        now: the clock, monotonic seconds.
        advice: the advice in the message about a refused token.
    """

    def __init__(self, url: str, breaker: Breaker, now: Callable[[], float], advice: str) -> None:
        self._name = f"the cloud at {URL(url).host}:{URL(url).port}"
        self._now = now
        self._advice = advice
        self._gone = Fault(log, logging.WARNING, now)
        self._token_refused = Fault(log, logging.ERROR, now)
        self._breaker_open = Fault(log, logging.WARNING, now)
        self._models_unavailable: dict[str, Fault] = {}
        self._refused_by_probe = False
        self.breaker = breaker
        self.reachable: bool | None = None  # None: neither answered nor failed yet

    @property
    def token_refused(self) -> bool:
        return bool(self._token_refused.problem)

    @property
    def problems(self) -> tuple[str, ...]:
        faults = (self._gone, self._token_refused, self._breaker_open, *self._models_unavailable.values())
        return tuple(fault.problem for fault in faults if fault.problem)

    def answered(self, status: int, *, probe: bool = False) -> None:
        """Note a response, whatever its HTTP status."""
        if self.reachable is not True:
            if self.reachable is None:
                log.info("%s is reachable", self._name)
            self.reachable = True
            self._gone.end(f"{self._name} is reachable again")
        if status == 401:
            self._refused_by_probe = probe and (self._refused_by_probe or not self.token_refused)
            self._token_refused.begin(f"{self._name} refuses the token (HTTP 401): {self._advice}")
        # A server may list its models without a token: a probe that succeeds proves nothing about requests.
        elif self._token_refused.problem and status < 400 and (not probe or self._refused_by_probe):
            self._token_refused.end(f"{self._name} accepts the token again")

    def lost(self, error: Exception) -> None:
        """Note that no connection could be made, or that the probe failed."""
        self.reachable = False
        self._gone.begin(f"{self._name} cannot be reached: {_reason(error)}")

    def model_unavailable(self, model: str, reason: str) -> None:
        """Note that the server answers, and that nothing behind it can for this model."""
        fault = self._models_unavailable.setdefault(model, Fault(log, logging.WARNING, self._now))
        fault.begin(f"{self._name} has no server for {model} ({reason}): requests go to other targets")

    def model_answered(self, model: str) -> None:
        """Note that a call of the model succeeded."""
        if fault := self._models_unavailable.pop(model, None):
            fault.end(f"{self._name} answers for {model} again")

    def succeeded(self) -> None:
        """Report a call that the server answered."""
        self.breaker.success(self._now())
        if self._breaker_open.problem and self.breaker.state(self._now()) == "closed":
            self._breaker_open.end("the cloud's circuit breaker is closed again")

    def failed(self) -> None:
        """Report a call that counts against the server."""
        now = self._now()
        self.breaker.failure(now)
        if self.breaker.state(now) == "open":
            self._breaker_open.begin(
                f"{self._name} failed repeatedly, its circuit breaker is open: "
                f"requests go to other targets, the next try is in {self.breaker.retry_after_s(now):.0f} s"
            )


def _reason(error: Exception) -> str:
    """The system's words for it if there are any; the message of an exception may quote anything."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, OSError) and cause.errno is not None and cause.errno > 0:
        return os.strerror(cause.errno)
    return type(error).__name__
