"""The expected length of a model's answer to a prompt, learned from the lengths of its earlier answers.

A linear model of the logarithm of the length, over the client's limit and the structure of the prompt, by recursive
least squares with weights that may drift (a Kalman filter). The exponential of a mean logarithm is below the mean
length; the ratio of the recent lengths to their estimates corrects that (Duan 1983, smearing).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul
from typing import Final

from causeway_server.models.signals.structure import STRUCTURE, structure
from causeway_server.router.decision.candidates import MOST_TOKENS

_INPUTS: Final = STRUCTURE + 2
_FEWEST: Final = 30  # answers before an estimate
_DRIFT: Final = 1e-5  # variance that each answer adds to each weight
_KEPT: Final = 0.995  # what a length counts in the ratio after the next answer


class AnswerLengths:
    """The lengths of one model's answers."""

    def __init__(self) -> None:
        self._weights = [0.0] * _INPUTS
        self._spread = [[float(row == column) for column in range(_INPUTS)] for row in range(_INPUTS)]  # covariance
        self._answers = 0
        self._tokens = self._estimated = 0.0  # of recent answers, and by the logarithm alone

    def expected(self, inputs: Sequence[float]) -> float | None:
        """Return the expected tokens of an answer; None before enough answers. `inputs`: `length_inputs`."""
        if self._answers < _FEWEST:
            return None
        return min(MOST_TOKENS, max(1.0, self._by_logarithm(inputs) * self._tokens / self._estimated))

    def learn(self, inputs: Sequence[float], tokens: float) -> None:
        """Take the length of an answer into account. Takes some tens of microseconds."""
        tokens = min(max(1.0, tokens), MOST_TOKENS)
        error = math.log(tokens) - _dot(self._weights, inputs)
        towards = [_dot(row, inputs) for row in self._spread]
        doubt = 1.0 + _dot(towards, inputs)
        self._weights = [weight + one / doubt * error for weight, one in zip(self._weights, towards, strict=True)]
        for at, row in enumerate(self._spread):
            row[:] = [value - towards[at] * one / doubt for value, one in zip(row, towards, strict=True)]
            row[at] += _DRIFT
        self._answers += 1
        self._tokens = self._tokens * _KEPT + tokens
        self._estimated = self._estimated * _KEPT + self._by_logarithm(inputs)

    def _by_logarithm(self, inputs: Sequence[float]) -> float:
        return math.exp(min(_dot(self._weights, inputs), math.log(MOST_TOKENS)))


def length_inputs(text: str, limit: int | None) -> tuple[float, ...]:
    """Return the inputs for a prompt. `limit`: the client's, tokens; None without one."""
    return (1.0, math.log1p(MOST_TOKENS if limit is None else limit), *structure(text))


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return float(sum(map(mul, one, other)))
