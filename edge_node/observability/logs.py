"""Log lines about a lasting fault, at its beginning and its end, and about the hops of one request."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from causeway_server.router.types import AttemptRecord, Decision, DecisionRecord, Request

log = logging.getLogger(__name__)


class Fault:
    """A lasting fault that operators must know: logged, at `level`, when it begins, and at info when it ends. `problem`
    describes it for `/readyz` while it lasts; "" otherwise.
    """

    def __init__(self, log: logging.Logger, level: int, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._level = level
        self._monotonic = monotonic
        self._since = 0.0
        self.problem = ""

    def begin(self, problem: str) -> None:
        """Record the fault, when it is noticed for the first time or again."""
        if not self.problem:
            self._since = self._monotonic()
            self._log.log(self._level, problem)
        self.problem = problem

    def end(self, message: str) -> None:
        """Record that the fault is over. No-op if there was none."""
        if self.problem:
            self._log.info("%s (after %.1f s).", message, self._monotonic() - self._since)
            self.problem = ""


# --- one request, at level debug only, without content: the fields of a decision record ------------------------------


def log_arrival(request_id: str, request: Request) -> None:
    hints = request.hints
    streamed = ", streamed" if request.stream else ""
    tags = f", tags {','.join(hints.tags)}" if hints.tags else ""
    prefer = f", {hints.prefer}" if hints.prefer else ""
    log.debug(
        "Request %s arrived: %s %s from %s%s%s%s.",
        request_id,
        request.kind,
        request.model,
        hints.client,
        streamed,
        tags,
        prefer,
    )


def log_decision(request_id: str, decision: Decision) -> None:
    targets = ", ".join(plan.target.name for plan in decision.attempts) or "no target"
    rule = f" by {decision.rule}" if decision.rule else ""
    bound = "; bound to the device" if decision.on_device else ""
    if decision.regions is not None:
        bound += f"; bound to {', '.join(decision.regions) or 'no region'}"
    log.debug("Request %s was decided: %s%s%s.", request_id, targets, rule, bound)


def log_outcome(record: DecisionRecord) -> None:
    """Log the attempts, then the outcome."""
    outcome = record.outcome
    for attempt in outcome.attempts:
        log.debug("Request %s tried %s: %s.", record.id, attempt.target, _attempt(attempt))
    cache = f"{outcome.cache} ({outcome.cache_reason})" if outcome.cache_reason else outcome.cache
    error = f", {outcome.error}" if outcome.error else ""
    log.debug(
        "Request %s ended: %s %d%s, route %s, cache %s, %.1f ms.",
        record.id, outcome.status, outcome.http_status, error, outcome.route, cache, outcome.total_ms,
    )  # fmt: skip


def _attempt(attempt: AttemptRecord) -> str:
    error = f" {attempt.error}" if attempt.error else ""
    first = f", first token after {attempt.ttft_ms:.1f} ms" if attempt.ttft_ms is not None else ""
    took = f", {attempt.duration_ms:.1f} ms" if attempt.duration_ms is not None else ""
    return f"{attempt.state}{error}, began at {attempt.started_ms:.1f} ms{first}{took}, {attempt.tokens} tokens"
