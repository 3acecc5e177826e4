"""The order in which a calibration asks its prompts."""

from __future__ import annotations

from causeway_server.models.comparison.prompts import EvaluationPrompt, Metric
from causeway_train.calibrate.prompts import collection_order


def test_any_beginning_of_the_order_is_a_fair_sample() -> None:
    """Tasks take turns; the one with long answers takes every fifth; the same seed gives the same order."""
    kinds: tuple[tuple[str, Metric], ...] = (("a", "text"), ("b", "text"), ("long", "number"))
    asked = [
        EvaluationPrompt(task=task, prompt=f"{task} {number}", metric=metric, answer="1")
        for task, metric in kinds
        for number in range(40)
    ]
    order = collection_order(asked, seed=1)
    assert sorted(order, key=lambda one: one.id) == sorted(asked, key=lambda one: one.id)
    first = [one.task for one in order[:44]]
    assert (first.count("a"), first.count("b"), first.count("long")) == (20, 20, 4)
    assert order == collection_order(asked, seed=1) != collection_order(asked, seed=2)
