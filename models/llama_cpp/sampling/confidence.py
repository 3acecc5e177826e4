"""What the logits say about a token: its log-probability, the alternatives, and the model's confidence.

Everything is computed from the model's own distribution, before temperature, penalties, bias and grammar. Natural
logarithms.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from router.types import Confidence, TokenAlternative, TokenLogprob

from ..native.vocabulary import Vocabulary

LogitsRow = NDArray[np.float32]  # logits of one position, [vocabulary]


def log_sum_exp(row: LogitsRow) -> float:
    """Return log(sum(exp(row))): a logit less this is a log-probability."""
    top = float(row.max())
    return top + math.log(float(np.exp(row - top).sum()))


def token_logprob(row: LogitsRow, token: int, best: int, vocabulary: Vocabulary) -> TokenLogprob:
    """Return the log-probability of `token` and those of the `best` likeliest tokens."""
    total = log_sum_exp(row)
    top: list[int] = []
    if best:
        best = min(best, len(row))
        candidates = np.argpartition(row, -best)[-best:]
        top = candidates[np.argsort(row[candidates])[::-1]].tolist()
    alternatives = tuple(
        TokenAlternative(_shown(vocabulary.pieces[other]), float(row[other]) - total, tuple(vocabulary.pieces[other]))
        for other in top
    )
    piece = vocabulary.pieces[token]
    return TokenLogprob(_shown(piece), float(row[token]) - total, tuple(piece), alternatives)


class ConfidenceMeter:
    """Running means over the first tokens of an answer.

    score = (1 - refusal) · exp(mean logprob), refusal = p(refusal token) at the first position: the geometric mean of
    the sampled tokens' probabilities, times the probability that the model does not refuse.
    """

    __slots__ = ("_entropy", "_least", "_logprob", "_margin", "_refusal", "_refuse_token", "_remaining", "_tokens")

    def __init__(self, tokens: int, refuse_token: int | None) -> None:
        """Observe `tokens` tokens; `refuse_token` None: the model has none."""
        self._remaining = tokens
        self._refuse_token = refuse_token
        self._tokens = 0
        self._logprob = self._margin = self._entropy = self._refusal = self._least = 0.0

    @property
    def done(self) -> bool:
        return self._remaining <= 0

    def observe(self, row: LogitsRow, token: int) -> Confidence:
        """Add one position: its logits, float32 [vocabulary], and the token sampled there."""
        logprobs = row - np.float32(log_sum_exp(row))
        probabilities = np.exp(logprobs)
        if len(probabilities) > 1:
            second, first = np.partition(probabilities, -2)[-2:].tolist()
        else:
            second, first = 0.0, float(probabilities[0])
        if not self._tokens and self._refuse_token is not None:
            self._refusal = min(1.0, float(probabilities[self._refuse_token]))
        self._tokens += 1
        self._remaining -= 1
        logprob = float(logprobs[token])
        self._logprob += logprob
        self._least = min(self._least, logprob)
        self._margin += first - second
        self._entropy -= float(np.dot(probabilities, logprobs))
        n = self._tokens
        mean = self._logprob / n
        score = (1.0 - self._refusal) * math.exp(min(0.0, mean))
        return Confidence(n, score, mean, self._margin / n, max(0.0, self._entropy / n), self._refusal, self._least)


def _shown(piece: bytes) -> str:
    return piece.decode(errors="replace")
