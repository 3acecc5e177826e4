"""Fit, figures and thresholds on synthetic pairs whose truth is known."""

from __future__ import annotations

import random

import numpy as np
import pytest

from causeway_server.models.catalog.artifact import find_artifact
from causeway_server.models.comparison.prompts import EvaluationPrompt
from causeway_server.models.signals.encoder import SentenceEncoder
from causeway_server.router.types import Confidence
from causeway_train.calibrate.fit import Rows, Unseen, fit_pair, folds_of, predict_unseen, quality_inputs
from causeway_train.calibrate.prompts import ModelAnswer, PairAnswers, label
from causeway_train.calibrate.report import (
    BOTH,
    PROMPT,
    Target,
    calibration_errors,
    choose_threshold,
    evaluate_pair,
    kept_on_device,
    operate,
    signals_of,
)
from causeway_train.calibrate.routing_curves import Array64, apgr
from causeway_train.calibrate.run import as_rows

from .pairs import EASY, answered, prompts

pytestmark = pytest.mark.slow

STAGES = (1, 8)


@pytest.fixture(scope="module")
def encoder() -> SentenceEncoder:
    return SentenceEncoder(find_artifact("encoder").path)


@pytest.fixture(scope="module")
def rows(encoder: SentenceEncoder) -> Rows:
    """400 prompts; the small model is good at one kind, and its confidence tells."""
    asked = prompts(400)
    return as_rows(label(asked, answered(asked, seed=1), encoder), encoder)


@pytest.fixture(scope="module")
def unseen(rows: Rows) -> Unseen:
    return predict_unseen(rows, STAGES, seed=1)


def cross_validated(rows: Rows) -> dict[str, Array64]:
    return signals_of(rows, predict_unseen(rows, STAGES, seed=1), 8)


def test_signals_that_tell_are_found_and_calibrated(rows: Rows, unseen: Unseen) -> None:
    """On unseen rows both are far better than random, confidence adds to the prompt, and probabilities are true."""
    whole, *tasks = evaluate_pair(rows, signals_of(rows, unseen, 8), seed=1)
    both, prompt = whole.recovered[BOTH], whole.recovered[PROMPT]
    assert both is not None
    assert prompt is not None
    assert prompt.low > 0.55
    assert both.value > prompt.value
    assert both.low > 0.6
    assert whole.verdict == "routable"
    assert len(tasks) == 2
    assert max(calibration_errors(rows, signals_of(rows, unseen, 8)).values()) < 0.1


def test_the_kind_of_a_prompt_is_told_and_one_task_has_none(rows: Rows) -> None:
    """The small model gains less on the hard kind; a device computes the same as the fit."""
    fitted = fit_pair(rows, STAGES, seed=1)
    assert fitted.kinds is not None
    gains = quality_inputs(fitted.kinds, rows.inputs)[:, -1]
    assert gains[::2].mean() > gains[1::2].mean() + 0.2
    assert fitted.kinds(rows.inputs[0].tolist()) == pytest.approx(gains[0])
    easy = rows[np.arange(0, len(rows), 2)]
    assert fit_pair(easy, STAGES, seed=1).kinds is None


@pytest.mark.parametrize("keep", [0.8, 0.95, 1.0])
def test_the_threshold_meets_the_owner_s_target_on_unseen_rows(rows: Rows, unseen: Unseen, keep: float) -> None:
    """Within the interval; a smaller promise sends less to the cloud."""
    operation = operate(rows, kept_on_device(rows, unseen, 1, Target(keep=keep)), seed=1)
    assert operation.retained.low <= keep + 0.02
    assert operation.retained.high >= keep
    assert operation.cloud.value < 1.0


def test_the_cloud_gets_the_share_that_the_owner_names(rows: Rows, unseen: Unseen) -> None:
    """From the prompt alone only whole kinds can be told apart: half of these prompts are easy."""
    for stage, shares in ((1, (0.0, 0.3, 0.7, 1.0)), (None, (0.0, 0.5, 1.0))):
        for share in shares:
            kept = kept_on_device(rows, unseen, stage, Target(cloud_share=share))
            operation = operate(rows, kept, seed=1)
            assert operation.cloud.value == pytest.approx(share, abs=0.06)


def test_noise_is_not_routed(encoder: SentenceEncoder) -> None:
    """Where confidence and prompt say nothing the report says so."""
    asked = prompts(200)
    rows = as_rows(label(asked, answered(asked, seed=2, telling=False), encoder), encoder)
    whole, *_ = evaluate_pair(rows, cross_validated(rows), seed=1)
    assert whole.verdict == "nothing to route on these prompts: no signal is better than random"


def test_a_small_model_that_only_guesses_is_said(encoder: SentenceEncoder) -> None:
    """With the kind of prompt, while the kind that it is good at stays routable beside it."""
    quiz = [
        EvaluationPrompt(
            prompt=f"Which of these is number {number}?",
            task="quiz",
            metric="choice",
            answer="ABCD"[number % 4],
            choices={letter: f"{letter} {number}" for letter in "ABCD"},
        )
        for number in range(160)
    ]
    draw = random.Random(5)
    guesses = {
        one.id: PairAnswers(
            one.id,
            "quiz",
            ModelAnswer(draw.choice("ABCD"), confidences=(confidence(draw.uniform(0.2, 0.4)),)),
            ModelAnswer(one.answer or "" if draw.random() < 0.7 else "none"),
        )
        for one in quiz
    }
    asked = prompts(160)
    rows = as_rows(label([*asked, *quiz], {**answered(asked, seed=1), **guesses}, encoder), encoder)
    whole, easy, _, guessed = evaluate_pair(rows, cross_validated(rows), seed=1)
    assert (whole.verdict, easy.name, guessed.name) == ("routable", EASY, "quiz")
    assert guessed.at_chance
    assert guessed.verdict == "nothing to route on these prompts: the small model is not better than chance (25%)"
    alone = rows[np.array([row.task == "quiz" for row in rows.answers]).nonzero()[0]]
    (only,) = evaluate_pair(alone, cross_validated(alone), seed=1)
    assert not only.routable
    assert only.verdict.endswith("the small model is not better than chance (25%)")


def confidence(score: float) -> Confidence:
    return Confidence(1, score, -1 + score, score, 1 - score, least=-1 + score)


def test_a_large_model_that_is_no_better_leaves_nothing_to_route(encoder: SentenceEncoder) -> None:
    asked = prompts(60)
    rows = as_rows(label(asked, answered(asked, seed=3), encoder), encoder)
    same = Rows(rows.answers, rows.inputs, rows.small, rows.small)
    whole, *_ = evaluate_pair(same, cross_validated(same), seed=1)
    assert whole.recovered[BOTH] is None
    assert whole.verdict == "nothing to route: the large model is not better"


def test_thresholds_at_the_ends() -> None:
    """Everything in the cloud, everything on the device, and the least that keeps the target."""
    values = np.array([0.9, 0.6, 0.2])
    small, large = np.array([1.0, 1.0, 0.0]), np.ones(3)
    assert choose_threshold(values, np.zeros(3), large, Target(keep=1.0)) == 1.0
    assert choose_threshold(values, large, large, Target(keep=1.0)) == 0.0
    assert choose_threshold(values, small, large, Target(keep=1.0)) == pytest.approx(0.6)
    assert choose_threshold(values, small, large, Target(cloud_share=0.7)) == pytest.approx(0.9)


def test_a_row_that_stands_for_several_prompts_counts_as_often() -> None:
    """The threshold is the one of the repeated rows, and so are the figures."""
    values, large = np.array([0.9, 0.6, 0.2]), np.ones(3)
    small, weights = np.array([1.0, 0.0, 0.0]), np.array([1.0, 1.0, 8.0])
    whole = np.repeat(np.arange(3), weights.astype(int))
    for target in (Target(keep=0.9), Target(cloud_share=0.8)):
        expected = choose_threshold(values[whole], small[whole], large[whole], target)
        assert choose_threshold(values, small, large, target, weights) == expected
    assert apgr(values, small, large, weights) == pytest.approx(apgr(values[whole], small[whole], large[whole]))
    assert apgr(values, small, large, weights) != pytest.approx(apgr(values, small, large))


def test_prompts_without_answers_help_to_tell_the_tasks_apart(rows: Rows, encoder: SentenceEncoder) -> None:
    """Few answers, many prompts: the expected gain of a prompt is nearer to that of its task."""
    few = rows[np.arange(24)]
    asked = [one for one in prompts(400) if one.question not in {row.text for row in few.answers}]
    more = as_rows(few.answers, encoder, asked)
    assert more.unanswered is not None
    assert more[np.arange(3)].unanswered is more.unanswered
    gains = [
        quality_inputs(fit_pair(one, (1,), seed=1).kinds, rows.inputs[24:])[:, -1].reshape(-1, 2).mean(axis=0)
        for one in (few, more)
    ]
    assert gains[1][0] - gains[1][1] > gains[0][0] - gains[0][1] > 0


def test_each_fold_has_its_part_of_every_stratum() -> None:
    draw = random.Random(1)
    strata = [draw.choice("aab") for _ in range(103)]
    folds = folds_of(strata, seed=1)
    assert sorted(np.concatenate(folds).tolist()) == list(range(103))
    counts = [sum(strata[row] == "b" for row in fold) for fold in folds]
    assert max(counts) - min(counts) <= 1
