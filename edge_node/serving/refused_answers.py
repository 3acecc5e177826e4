"""One check of a semantic answer, and which new answers it refuses: the cached one is better than a degraded one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from router.errors import BackendError, BreakerOpen, EngineUnavailable

from ..storage.cache import CacheHit

if TYPE_CHECKING:
    from .generation import Generation


class SemanticCheck(msgspec.Struct, frozen=True):
    """A cached answer to a question that means the same, which waits for the new one."""

    log_odds: float
    hit: CacheHit


def refuse_skipped(generation: Generation) -> None:
    """Raise BackendError if a check's first choice is down and was skipped: only a degraded answer could be made."""
    decision = generation.decision
    if decision is None or not decision.skipped_target:
        return
    target = next(plan.target for plan in decision.attempts if plan.target.name == decision.skipped_target)
    down = EngineUnavailable if target.at == "edge" else BreakerOpen
    raise down(f"{target.name} is down, and a degraded answer is no check", phase="connect")


def refuse_degraded(generation: Generation) -> None:
    """Raise BackendError if a check's new answer, of which no byte was sent, is degraded, as the cached one is not."""
    if generation.degraded:
        raise BackendError("the answer is degraded, and the cached one is not")
