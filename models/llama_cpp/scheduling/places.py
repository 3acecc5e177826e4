"""Where the tokens of a prompt with a vision model's pictures stand: which belong together, and their positions."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..native.vocabulary import Tokens
from ..soft_tokens import PlacedRun


class _Stretch(msgspec.Struct, frozen=True, eq=False):
    """A run in the prompt: the index of its first token, and that one's position."""

    start: int
    position: int
    run: PlacedRun

    @property
    def end(self) -> int:
        return self.start + self.run.count


class Places:
    """Of one prompt.

    Args:
        prompt: its tokens, int32 [tokens].
        placed: its runs, by the id of their first soft token.
    """

    def __init__(self, prompt: Tokens, placed: Mapping[int, PlacedRun]) -> None:
        self._stretches: list[_Stretch] = []
        fewer = 0  # positions than tokens so far
        for index in np.flatnonzero(np.isin(prompt, list(placed))).tolist():
            run = placed[int(prompt[index])]
            self._stretches.append(_Stretch(index, index - fewer, run))
            fewer += run.count - run.span
        self._starts = [one.start for one in self._stretches]

    def position(self, index: int) -> int:
        """Return the position of a token that is not within a run."""
        before = self._at(index - 1)
        return index if before is None else before.position + before.run.span + index - before.end

    def run(self, start: int, count: int) -> tuple[int, bool]:
        """Return how many of `count` soft tokens from `start` belong to its run, and whether they see each other."""
        own = self._at(start)
        if own is not None and start < own.end:
            return own.end - start, own.run.whole
        following = bisect_right(self._starts, start)
        return min([count, *(one - start for one in self._starts[following : following + 1])]), False

    def offsets(self, start: int, end: int) -> tuple[int, NDArray[np.int32] | None]:
        """Return the first position of the soft tokens from `start` to before `end`, and the others from there."""
        own = self._at(start)
        if own is None or start >= own.end:
            return self.position(start), None
        if own.run.positions is None:
            return own.position + start - own.start, None
        return own.position, own.run.positions[:, start - own.start : end - own.start]

    def cut(self, tokens: int) -> int:
        """Return `tokens`, or fewer if the last of them is within a run that goes on behind it."""
        own = self._at(tokens)
        return own.start if own is not None and own.start < tokens < own.end else tokens

    def _at(self, index: int) -> _Stretch | None:
        """The last run that begins at `index` or before."""
        found = bisect_right(self._starts, index)
        return self._stretches[found - 1] if found else None
