"""A promise of quality: the device answers only on evidence, and what labels say moves its threshold."""

from __future__ import annotations

import msgspec
import pytest

from causeway_server.models.signals.calibration import Correction
from causeway_server.models.signals.promise import KeptPromise, PromiseDraw, PromiseRecord
from causeway_server.router.types import Promise

PROMISE = Promise("large", keep=0.95, risk=0.05, tolerance=0.01, shadow=0.1, only_where_measured=False)
OF_DEVICE, OF_CLOUD = PromiseDraw(True, 0.1, True), PromiseDraw(False, 0.5, False)
SURE, UNSURE = 0.95, 0.3


def new() -> KeptPromise:
    return KeptPromise(PROMISE, PromiseRecord("one"))


def opened() -> KeptPromise:
    """A promise after 1,200 answers of the cloud; the device's are good where it is sure, and bad where it is not."""
    kept = new()
    for at in range(1_200):
        kept.count(None)
        if at % 2 == 0:
            kept.label(SURE if at % 4 else UNSURE, OF_CLOUD, good=bool(at % 4))
    return kept


def serve(kept: KeptPromise, requests: int, *, good: bool) -> int:
    """Serve sure answers of the device, of which every tenth is labelled; return how many it gave."""
    given = 0
    for at in range(requests):
        on_device = kept.signals.threshold is not None and kept.signals.threshold <= SURE
        given += on_device
        kept.count(SURE if on_device else None)
        if on_device and at % 10 == 0:
            kept.label(SURE, OF_DEVICE, good=good)
    return given


def test_without_labels_the_device_does_not_answer() -> None:
    kept = new()
    assert (kept.signals.threshold, kept.signals.detail) == (None, "0 of 120 labelled answers")
    for _ in range(119):
        kept.count(None)
        kept.label(SURE, OF_CLOUD, good=True)
    assert (kept.signals.threshold, kept.signals.detail) == (None, "119 of 120 labelled answers")


def test_labels_of_the_clouds_answers_open_it_where_they_are_good() -> None:
    threshold = opened().signals.threshold
    assert threshold is not None
    assert UNSURE < threshold < SURE


def test_bad_answers_raise_the_threshold_until_the_cloud_answers_alone() -> None:
    kept = opened()
    assert serve(kept, 2_000, good=False) < 100
    assert kept.record.alarms == 1
    assert kept.signals.threshold is None
    assert kept.signals.detail.startswith("the quality fell: 0 of ")


def test_good_answers_keep_it_open() -> None:
    kept = opened()
    assert serve(kept, 2_000, good=True) == 2_000
    assert kept.record.alarms == 0


def test_a_relapse_needs_twice_the_labels() -> None:
    kept = opened()
    for alarms, needed in ((1, 120), (2, 240)):
        while kept.record.alarms < alarms:
            kept.label(SURE, OF_DEVICE, good=False)
        assert kept.signals.detail == f"the quality fell: 0 of {needed} labelled answers"
        for _ in range(needed):
            kept.count(None)
            kept.label(SURE, OF_CLOUD, good=True)


def test_in_doubt_more_answers_are_labelled() -> None:
    kept = opened()
    assert kept.draw_share(on_device=True) == PROMISE.shadow
    for _ in range(2):
        kept.label(SURE, OF_DEVICE, good=False)
    assert kept.draw_share(on_device=True) == 0.4


def test_the_bound_of_wrong_answers_exceeds_what_the_labels_stand_for() -> None:
    """Each labelled wrong answer stands for ten, and the bound never falls."""
    kept, bounds = opened(), [0.0]
    for labelled in range(1, 5):
        kept.label(SURE, OF_DEVICE, good=False)
        bounds.append(kept.wrong_at_most)
        assert bounds[-1] > max(10 * labelled, bounds[-2])


def test_a_spent_allowance_leaves_the_cloud_alone_and_comes_back_with_good_requests() -> None:
    kept = opened()
    kept.record.losses = [10.0, 10.0, 10.0]
    kept.label(SURE, OF_CLOUD, good=True)
    assert (kept.signals.threshold, kept.signals.detail) == (None, "the allowance of wrong answers is spent")
    while kept.wrong_at_most > 0.06 * kept.record.requests:
        kept.count(None)
    kept.label(SURE, OF_CLOUD, good=True)
    assert kept.signals.threshold is not None


def test_comparisons_that_fail_close_it() -> None:
    """An outage of the cloud has this effect, and so has a budget that is spent."""
    kept = opened()
    for _ in range(19):
        kept.miss(OF_DEVICE)
    assert kept.signals.threshold is not None
    kept.miss(OF_DEVICE)
    assert kept.signals.threshold is None
    assert kept.signals.detail.startswith("most comparisons with the cloud fail: ")


def test_bad_feedback_raises_the_threshold() -> None:
    kept = opened()
    before = kept.signals.threshold
    for _ in range(5):
        kept.object(0.8)
    after = kept.signals.threshold
    assert before is not None
    assert after is not None
    assert after > before


def test_the_state_survives_as_json() -> None:
    kept = opened()
    serve(kept, 50, good=False)
    kept.label(SURE, OF_CLOUD, good=True)
    stored = msgspec.json.decode(msgspec.json.encode(kept.record), type=PromiseRecord)
    again = KeptPromise(PROMISE, stored)
    assert again.record == kept.record
    assert again.signals.threshold == pytest.approx(kept.signals.threshold)


def test_a_million_requests_overflow_nothing() -> None:
    kept = opened()
    kept.record.weight = 1e99
    serve(kept, 10_000, good=True)
    assert kept.record.weight < 1e100
    assert kept.signals.threshold is not None


def test_failing_comparisons_only_suspend_it() -> None:
    """What is known stays known: the usual number of labels opens it again, however often that happens."""
    kept = opened()
    known = list(kept.record.labels)
    for _ in range(4):
        for _ in range(40):
            kept.miss(OF_DEVICE)
        assert kept.signals.threshold is None
        assert sum(kept.record.labels) >= sum(known)
        for _ in range(120):
            kept.count(None)
            kept.label(SURE, OF_CLOUD, good=True)
        assert kept.signals.threshold is not None


def test_a_promise_that_only_measures_does_not_count_what_it_was_not_about() -> None:
    """Without evidence the route answers as it is written; those answers' faults do not close it for good."""
    kept = KeptPromise(msgspec.structs.replace(PROMISE, only_where_measured=True), PromiseRecord("one"))
    draw = PromiseDraw(True, 0.1, True, binds=kept.binds)
    assert not draw.binds
    for at in range(1_200):
        kept.count(UNSURE if at % 2 else SURE)
        if at % 10 < 2:
            kept.label(UNSURE if at % 2 else SURE, draw, good=at % 2 == 0)
    assert kept.record.requests < 1_200
    assert kept.wrong_at_most < 100
    threshold = kept.signals.threshold
    assert threshold is not None
    assert UNSURE < threshold < SURE
    assert kept.binds
    assert all(bet < 1e6 for bet in kept.record.bets)


def test_where_the_surest_answers_are_wrong_too_often_the_cloud_answers() -> None:
    kept = new()
    for at in range(1_200):
        kept.count(None)
        kept.label(0.999, OF_CLOUD, good=at % 5 != 0)
    assert kept.signals.threshold is None


def of_two_kinds() -> KeptPromise:
    """A promise whose device states 0.8 for both kinds; one of them is good, the other one bad."""
    kept = new()
    for at in range(2_000):
        kept.count(None, at % 2)
        kept.label(0.8, OF_CLOUD, good=at % 2 == 0, kind=at % 2)
    return kept


def test_a_correction_by_kind_opens_the_kind_that_is_good() -> None:
    """Without it the evidence of both is about one confidence, at which too many answers are bad."""
    kept, correction = of_two_kinds(), Correction(1.0, 0.0, (1.0, -2.0))
    assert (kept.signals.threshold or 1.0) > 0.8
    kept.read_with(correction)
    threshold = kept.signals.threshold
    assert threshold is not None
    assert correction(0.8, 1) < threshold < correction(0.8, 0)


def test_no_evidence_is_lost_when_a_correction_ends() -> None:
    kept, before = opened(), opened()
    for correction in (Correction(0.5, -1.0), Correction()):
        kept.read_with(correction)
        kept.count(SURE)
        before.count(SURE)
        kept.label(SURE, OF_DEVICE, good=True)
        before.label(SURE, OF_DEVICE, good=True)
    assert kept.signals == before.signals
    assert kept.record == before.record


def test_a_correction_moves_the_threshold_as_it_moves_the_confidence() -> None:
    kept, correction = opened(), Correction(1.0, -1.0)
    threshold = kept.signals.threshold
    assert threshold is not None
    kept.read_with(correction)
    assert kept.signals.threshold == pytest.approx(correction(threshold, 0), abs=0.01)
