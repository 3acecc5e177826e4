"""Fitting of the calibrator's stage for spoken requests, in which the transcript's confidence lowers or raises the
answer's; and counting of words for the model that chooses among transcripts.

Rows that were held back from the model are transcribed (`data.transcripts`). The stage is fitted on the half of them
that the calibrator was fitted on, and measured on the other half (`quality.halves`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from causeway_server.models.parts.encoders.words import END, START, WordCounts
from causeway_server.models.signals.calibration import ConfidenceCalibrator, LinearLogit, log_odds
from causeway_server.router.parts.reading import spoken_form

from ..calibrate.fit import fit_logistic
from ..data.transcripts import TranscribedRow
from ..evaluate.greedy import Answer
from .calibration import confidence_at, probability_at
from .graded_answers import GradedAnswer, grade
from .quality import correctness, halves

_MIN_COUNT = 2  # of a bigram or trigram that is kept


class SpokenAnswer(msgspec.Struct, frozen=True):
    """The graded answer to a transcript; `heard`: the transcript's confidence, 0 to 1."""

    answer: GradedAnswer
    heard: float


class SpokenMetrics(msgspec.Struct, frozen=True):
    """Shares of the spoken rows: answers that a handoff at `below` keeps on the device, and wrong ones among them.

    `typed`: with the calibrator as it is for typed requests; `spoken`: with the stage for spoken ones.
    """

    rows: int
    right: float  # share of answers that are right, whether the handoff keeps them or not
    below: float
    typed_kept: float
    typed_wrong_kept: float
    spoken_kept: float
    spoken_wrong_kept: float

    def metrics(self) -> dict[str, float]:
        """Return all figures as one mapping, for a manifest."""
        return {f"spoken/{key}": value for key, value in msgspec.structs.asdict(self).items()}


def grade_heard(
    transcribed: Sequence[TranscribedRow], answers: Sequence[Answer]
) -> tuple[list[SpokenAnswer], list[SpokenAnswer]]:
    """Grade the answers to transcripts by what was said, and return those to fit on and those to measure on.

    An audio clip in which no words were found gets no answer, and is left out.
    """
    graded = grade([one.row for one in transcribed], answers, lambda _: True)
    confidence = {one.row.text: one.confidence for one in transcribed if one.heard}
    halved = halves([one for one in graded if one.confidences and one.text in confidence])
    first, second = ([SpokenAnswer(one, confidence[one.text]) for one in half] for half in halved)
    return first, second


def fit_spoken(heard: Sequence[SpokenAnswer], calibrator: ConfidenceCalibrator, tokens: int) -> LinearLogit:
    """Return the stage for spoken requests.

    Args:
        heard: answers to transcripts, with at least one confidence each.
        calibrator: the one for typed requests.
        tokens: Tokens after which the handoff is decided.
    """
    odds = [(log_odds(probability_at(calibrator, one.answer, tokens)), log_odds(one.heard)) for one in heard]
    truth = correctness([one.answer for one in heard])
    return fit_logistic(np.array(odds), truth, np.ones(len(truth)))


def measure_spoken(
    heard: Sequence[SpokenAnswer], calibrator: ConfidenceCalibrator, tokens: int, below: float
) -> SpokenMetrics:
    """Measure a calibrator with a stage for spoken requests on rows that its fit did not use."""
    truth = correctness([one.answer for one in heard])
    typed = np.array([probability_at(calibrator, one.answer, tokens) for one in heard]) >= below
    spoken = np.array([_spoken_probability(calibrator, one, tokens) for one in heard]) >= below
    return SpokenMetrics(
        rows=len(heard),
        right=float(truth.mean()),
        below=below,
        typed_kept=float(typed.mean()),
        typed_wrong_kept=float((typed & ~truth).mean()),
        spoken_kept=float(spoken.mean()),
        spoken_wrong_kept=float((spoken & ~truth).mean()),
    )


def _spoken_probability(calibrator: ConfidenceCalibrator, one: SpokenAnswer, tokens: int) -> float:
    confidence, ended = confidence_at(one.answer, tokens)
    return calibrator(confidence, tokens, ended=ended, transcript_confidence=one.heard)


def count_words(texts: Iterable[str], language: str) -> WordCounts:
    """Count the words of texts in their spoken form."""
    counts: tuple[Counter[str], ...] = (Counter(), Counter(), Counter())
    for text in texts:
        words = [START, START, *spoken_form(text, language).split(), END]
        for at in range(2, len(words)):
            for length, counter in enumerate(counts, start=1):
                counter[" ".join(words[at + 1 - length : at + 1])] += 1
    kept = [{words: count for words, count in counter.items() if count >= _MIN_COUNT} for counter in counts[1:]]
    return WordCounts(language, dict(counts[0]), kept[0], kept[1])
