"""What the logits say about a token: its probability, its rivals, and how sure the model was.

All of it is the model's own distribution, before temperature, penalties, bias and grammar. Natural logarithms.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from router.types import Confidence, TokenAlternative, TokenLogprob

from ..native.vocabulary import Vocabulary

LogitsRow = NDArray[np.float32]  # logits of one position, [vocabulary]


def log_total(row: LogitsRow) -> float:
    """log(sum(exp(row))): what a logit is reduced by to become a log-probability."""
    top = float(row.max())
    return top + math.log(float(np.exp(row - top).sum()))


def token_logprob(row: LogitsRow, token: int, best: int, vocabulary: Vocabulary) -> TokenLogprob:
    """The chosen token's log-probability and those of the `best` likeliest."""
    total = log_total(row)
    top: list[int] = []
    if best:
        best = min(best, len(row))
        found = np.argpartition(row, -best)[-best:]
        top = found[np.argsort(row[found])[::-1]].tolist()
    alternatives = tuple(
        TokenAlternative(_shown(vocabulary.pieces[other]), float(row[other]) - total, tuple(vocabulary.pieces[other]))
        for other in top
    )
    piece = vocabulary.pieces[token]
    return TokenLogprob(_shown(piece), float(row[token]) - total, tuple(piece), alternatives)


class ConfidenceMeter:
    """Running means over the first tokens of an answer.

    score = (1 - refusal) · exp(mean logprob), refusal = p(refusal token) at the first position: the geometric mean of
    the chosen tokens' probabilities, times the model's own word that the question is its to answer.
    """

    __slots__ = ("_entropy", "_left", "_logprob", "_margin", "_refusal", "_refuse", "_tokens")

    def __init__(self, tokens: int, refuse: int | None) -> None:
        self._left = tokens
        self._refuse = refuse
        self._tokens = 0
        self._logprob = self._margin = self._entropy = self._refusal = 0.0

    @property
    def done(self) -> bool:
        return self._left <= 0

    def observe(self, row: LogitsRow, token: int) -> Confidence:
        """Take in one position's logits and the token chosen there."""
        logs = row - np.float32(log_total(row))
        odds = np.exp(logs)
        second, first = np.partition(odds, -2)[-2:].tolist() if len(odds) > 1 else (0.0, float(odds[0]))
        if not self._tokens and self._refuse is not None:
            self._refusal = min(1.0, float(odds[self._refuse]))
        self._tokens += 1
        self._left -= 1
        self._logprob += float(logs[token])
        self._margin += first - second
        self._entropy -= float(np.dot(odds, logs))
        n = self._tokens
        mean = self._logprob / n
        score = (1.0 - self._refusal) * math.exp(min(0.0, mean))
        return Confidence(n, score, mean, self._margin / n, max(0.0, self._entropy / n), self._refusal)


def _shown(piece: bytes) -> str:
    return piece.decode(errors="replace")
