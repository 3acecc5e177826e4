"""Handoff: the device starts an answer, and the next target takes over if the first tokens show too little confidence.

Where each part of it lives:

- policy: a route's ``handoff: {after_tokens, below, within}`` (`policy/file.py`, checked by `policy/lint.py`);
- plan: `plan_handoff` below puts it on the attempts that may hand off, when `decide` plans the attempts of a route;
- confidence: the engine attaches `Confidence` to the first tokens of choice 0, and a `ConfidenceCalibrator` of the
  edge may turn its score into a probability;
- hold back: `Attempt` keeps the first chunks, `HandoffGate` below decides when and whether they are released. Below the
  threshold the attempt ends as HANDED_OFF with `LowConfidence`, and the client never sees its start.
"""

from __future__ import annotations

from typing import Literal

from ..types import AttemptPlan, Chunk, Confidence, Handoff, Target

HandoffVerdict = Literal["wait", "commit", "hand_off"]


def plan_handoff(
    targets: tuple[Target, ...], handoff: Handoff, down: frozenset[str] = frozenset()
) -> tuple[AttemptPlan, ...]:
    """Plan one attempt per target, in order, with the handoff where it applies.

    1. Only the device's engine reports confidence, so only an edge target hands off.
    2. It hands off only if a later target that is not known to be down can take over.
    3. It then also becomes the last resort, without handoff: if all targets after it fail, an answer of low confidence
       is better than none.

    Args:
        down: names of targets that are known to be down.
    """
    plans: list[AttemptPlan] = []
    last_resort: list[AttemptPlan] = []
    for index, target in enumerate(targets):
        can_take_over = any(later.name not in down for later in targets[index + 1 :])
        if target.at == "edge" and can_take_over:  # (1) (2)
            plans.append(AttemptPlan(target, handoff))
            last_resort.append(AttemptPlan(target))  # (3)
        else:
            plans.append(AttemptPlan(target))
    return tuple(plans + last_resort)


class HandoffGate:
    """Watches the first tokens of choice 0 and decides once whether they are released.

    1. After enough tokens or enough time, or when choice 0 ends earlier, the latest confidence is compared with
       `below`. The time counts from the first token, whose arrival a client without handoff would see.
    2. Without a reported confidence the answer is kept, and `detail` says so.
    """

    def __init__(self, handoff: Handoff) -> None:
        self._handoff = handoff
        self._tokens = 0
        self._first_at: float | None = None
        self.confidence: Confidence | None = None
        self.detail = ""

    def observe(self, chunk: Chunk, now: float) -> HandoffVerdict:
        """Return what happens to the chunks so far. `now`: monotonic seconds."""
        if chunk.index == 0:
            self._tokens += chunk.tokens
            if self._first_at is None and chunk.tokens:
                self._first_at = now
            self.confidence = chunk.confidence or self.confidence
        ended = (chunk.index == 0 and chunk.finish_reason is not None) or chunk.usage is not None
        if self._tokens < self._handoff.after_tokens and not ended and not self._late(now):
            return "wait"
        if self.confidence is None:  # (2)
            self.detail = "no confidence reported: kept"
            return "commit"
        return "hand_off" if self.confidence.score < self._handoff.below else "commit"  # (1)

    def _late(self, now: float) -> bool:
        within_s = self._handoff.within_s
        return within_s is not None and self._first_at is not None and now - self._first_at >= within_s
