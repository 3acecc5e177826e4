"""Ends a thought that has reached its budget: the end mark is put where the model would have gone on."""

from __future__ import annotations

from router.reasoning import CLOSE, OPEN, closed_thought

from ..native.vocabulary import Vocabulary
from ..protocol import Job

_OPEN, _CLOSE = OPEN.encode(), CLOSE.encode()


class ThinkingBudget:
    """Watches one sequence's tokens, and replaces the first one behind the budget, and some after it, by the end mark.

    The model then reads that it has finished thinking, and answers with what it has.
    """

    def __init__(self, vocabulary: Vocabulary, job: Job) -> None:
        """`job` has `thinking_tokens`, and `thinking`: whether its prompt ends inside a thought."""
        self._pieces = vocabulary.pieces
        self._ends = vocabulary.end_tokens
        self._left = job.thinking_tokens or 0
        end: list[int] = vocabulary.encode(closed_thought("open"), special=True).tolist()
        self._end = [token for token in end if token != vocabulary.bos]
        self._forced: list[int] = []
        self._text = b""  # the beginning until it is decided, then the last bytes
        self._thinks = job.thinking == "open"
        self._decided = self._thinks
        self._over = False

    def choose(self, token: int) -> int:
        """Return the token that comes next: `token`, which the model chose, or one of the end mark's."""
        if self._forced:
            return self._forced.pop(0)
        if self._over:
            return token
        if token < 0 or token in self._ends:
            self._over = True
            return token
        self._text += self._pieces[token]
        if not self._decided:
            start = self._text.lstrip()
            self._decided = len(start) >= len(_OPEN)
            self._thinks = start.startswith(_OPEN)
            self._over = self._decided and not self._thinks
        if not self._thinks or self._over:
            return token
        if _CLOSE in self._text:
            self._over = True
        elif self._left <= 0:
            self._over = True
            self._forced = self._end[1:]
            return self._end[0]
        self._left -= 1
        self._text = self._text[-len(_CLOSE) :]
        return token
