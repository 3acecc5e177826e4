"""The refit of a pair's calibration: what labels bring about, and what they do not."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from causeway_server.edge_node.signals.corrections import (
    REFUTED,
    WINDOW,
    RefitLabel,
    Refusal,
    fails_golden,
    propose,
    watched,
)
from causeway_server.models.signals.calibration import Correction, Refit, log_odds
from causeway_server.models.signals.pair import GoldenAnswer

STATED = log_odds(0.9)  # of both signals, always


def labels(*shares: float, count: int = 600, source: int = 0, kinds: int = 1) -> list[RefitLabel]:
    """Labels of kinds in turn, of which these shares are good, evenly spread."""
    found = []
    for at in range(count):
        kind, number = at % len(shares), at // len(shares)
        good = int((number + 1) * shares[kind]) > int(number * shares[kind])
        found.append(RefitLabel(kind % kinds, STATED, STATED, good, source))
    return found


def golden(share: float = 0.9, kinds: int = 1) -> list[GoldenAnswer]:
    return [GoldenAnswer(at % kinds, STATED, STATED, at % 10 < 10 * share) for at in range(300)]


def proposed(found: list[RefitLabel], known: list[GoldenAnswer], using: Refit | None = None) -> Refit | Refusal:
    return propose(found, known, using, "digest", 1_780_000_000.0)


def adopted(found: list[RefitLabel], known: list[GoldenAnswer]) -> Refit:
    refit = proposed(found, known)
    assert isinstance(refit, Refit), refit
    return refit


def test_a_true_calibration_stays() -> None:
    assert proposed(labels(0.9), golden()) == "not_better"


def test_labels_of_a_drift_correct_both_signals() -> None:
    refit = adopted(labels(0.7), golden(0.7))
    assert refit.confidence(0.9, 0) == pytest.approx(0.7, abs=0.02)
    assert refit.quality(0.9, 0) == refit.confidence(0.9, 0)
    assert (refit.number, refit.labels, refit.name) == (1, 600, "refit 1 of 2026-05-28T20:26Z")
    assert refit.gain == pytest.approx(0.154, abs=0.02)  # the Kullback-Leibler divergence of 0.7 and 0.9


def test_kinds_are_corrected_apart() -> None:
    refit = adopted(labels(0.95, 0.65, kinds=2), golden(0.8, kinds=2))
    assert refit.confidence(0.9, 0) > 0.9
    assert refit.confidence(0.9, 1) == pytest.approx(0.65, abs=0.05)


def test_a_further_refit_must_be_better_than_the_one_in_use() -> None:
    first = adopted(labels(0.7), golden(0.7))
    assert proposed(labels(0.7), golden(0.7), first) == "not_better"
    second = proposed(labels(0.85), golden(0.8), first)
    assert isinstance(second, Refit)
    assert (second.number, second.confidence(0.9, 0) > first.confidence(0.9, 0)) == (2, True)


def test_few_labels_bring_nothing_about() -> None:
    assert proposed(labels(0.2, count=199), golden(0.2)) == "not_better"


def test_one_client_brings_nothing_about_alone() -> None:
    """A third of the labels is false and of one client; without them the labels speak for what ships."""
    found = [
        msgspec.structs.replace(label, good=not label.good, source=1) if at % 3 == 0 else label
        for at, label in enumerate(labels(0.9))
    ]
    assert proposed(found, golden(0.8)) == "one_client"
    rare = [
        msgspec.structs.replace(one, source=int(at % 60 == 0), good=one.good and at % 60 > 0)
        for at, one in enumerate(labels(0.7))
    ]
    assert isinstance(proposed(rare, golden(0.7)), Refit)  # ten labels of another client do not prevent it
    everyone = [msgspec.structs.replace(label, source=at % 20) for at, label in enumerate(found)]
    assert isinstance(proposed(everyone, golden(0.8)), Refit)


def test_weak_labels_of_the_others_do_not_complete_one_clients_evidence() -> None:
    """Their labels alone speak for the correction, but less than they would if it were true of them."""
    found = [
        msgspec.structs.replace(label, good=False, source=1) if at % 3 == 0 else label
        for at, label in enumerate(labels(0.717))
    ]
    assert proposed(found, golden(0.7)) == "one_client"


def test_the_golden_answers_bound_what_labels_of_every_client_can_do() -> None:
    found = [msgspec.structs.replace(label, source=at % 20) for at, label in enumerate(labels(0.3))]
    assert proposed(found, golden(0.9)) == "golden"
    assert proposed(found, golden(0.9)[:49]) == "golden"
    refit = Refit("digest", 1, 0.0, 600, 0.1, Correction(), Correction(1.0, -2.0))
    assert fails_golden(refit, golden(0.9))
    assert not fails_golden(refit, golden(0.5))


def test_later_labels_give_a_refit_up() -> None:
    """Labels that the shipped calibration states better, and none before."""
    refit, against = adopted(labels(0.7), golden(0.7)), 1.0
    for label in labels(0.7, count=WINDOW):
        against = watched(against, refit, label)
        assert against < REFUTED
    for label in labels(0.95, count=100):
        against = watched(against, refit, label)
    assert against > REFUTED


def test_routes_without_a_handoff_correct_the_quality_alone() -> None:
    refit = adopted([msgspec.structs.replace(label, confidence=None) for label in labels(0.7)], golden(0.7))
    assert refit.confidence == Correction()
    assert refit.quality(0.9, 0) == pytest.approx(0.7, abs=0.02)


@pytest.mark.parametrize(
    "text", [b'{"slope": 5}', b'{"slope": 0}', b'{"offset": -4}', b'{"kinds": [9]}', b'{"slope": NaN}', b'{"other": 1}']
)
def test_a_correction_is_bounded(text: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        msgspec.json.decode(text, type=Correction)


def test_a_correction_keeps_the_order_of_one_kind() -> None:
    correction = Correction(0.3, 1.0, (-2.0,))
    values = [correction(value, 0) for value in np.linspace(0.01, 0.99, 50).tolist()]
    assert values == sorted(values)
    assert correction(0.5, 1) == pytest.approx(1 / (1 + np.exp(-1.0)))  # a kind without an offset of its own
