"""Shadow requests: after an answer the other side is asked the same, to learn when the device is good enough.

`plan_shadow` says whether a decision's answer may be followed by one, and `other_target` whom it is for. Which of them
are sent (a share, within a budget) is the daemon's choice.
"""

from __future__ import annotations

from ..policy.signals import modalities, wants_tools
from ..types import AttemptPlan, Request, Shadow, Target


def plan_shadow(shadow: Shadow, request: Request, attempts: tuple[AttemptPlan, ...]) -> Shadow | None:
    """Return `shadow` if both sides can answer and their answers can be compared, else None.

    1. The policy lets the device and the cloud answer this request.
    2. The answer is one text: no embedding, no tool calls, one choice, not the rest of another answer.
    3. The prompt is one text, because the signals are estimated from it.
    4. The device answers with its model alone: the signals say nothing about one with an adapter.
    """
    sides = {plan.target.at for plan in attempts}
    one_text = (
        request.kind != "embedding" and request.sequences == 1 and not wants_tools(request) and not request.resume
    )
    adapted = any(plan.target.adapter for plan in attempts)
    return shadow if len(sides) == 2 and one_text and not adapted and modalities(request) == ["text"] else None


def other_target(attempts: tuple[AttemptPlan, ...], answered: Target) -> Target | None:
    """Return the first target on the other side than the one that answered."""
    return next((plan.target for plan in attempts if plan.target.at != answered.at), None)
