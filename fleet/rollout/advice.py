"""Advice on the stages of a rollout for a cohort of this size, given before it begins."""

from __future__ import annotations

import math

from router.bundle.rollout import WHOLE

from .settings import RolloutSettings


def stage_boxes(share: int, boxes: int) -> int:
    """Return about how many of so many boxes a share holds; a stage has at least one."""
    return min(boxes, max(1, round(boxes * share / WHOLE))) if boxes else 0


def small_fleet_advice(settings: RolloutSettings, boxes: int) -> list[str]:
    """Return what an operator should know about these stages on so many boxes; empty: nothing.

    1. Stages that hold the same number of boxes only cost time.
    2. A comparison of few boxes cannot abort: of `n` boxes `m` can be drawn in C(n, m) ways, so the randomisation test
       never gives less than 1/C(n, m). Such a stage pauses instead.
    3. Without a control before the last stage, metrics are hardly compared at all.
    """
    if not boxes:
        return []
    counts = [stage_boxes(stage.share, boxes) for stage in settings.stages]
    percents = [f"{stage.share * 100 / WHOLE:g} %" for stage in settings.stages]
    advice = [  # (1)
        f"{percents[index - 1]} and {percents[index]} are both about {_boxes(count)}: use fewer stages"
        for index, count in enumerate(counts)
        if index and count == counts[index - 1]
    ]
    blind = [
        percent
        for percent, count in zip(percents, counts, strict=True)
        if count < boxes and 1 / math.comb(boxes, count) > settings.level(1)
    ]
    if blind:  # (2)
        advice.append(
            f"at {', '.join(blind)} there are too few boxes for a comparison to abort the rollout: "
            "if their metrics are worse, the stage is paused and waits for an approver"
        )
    if len(counts) > 1 and counts[-2] >= boxes > 0:  # (3)
        advice.append(f"{percents[-2]} leaves no box to compare with: make the last but one stage smaller")
    return advice


def _boxes(count: int) -> str:
    return f"{count} box" if count == 1 else f"{count} boxes"
