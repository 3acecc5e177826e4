"""Which texts are embedded next: callers take turns by the time that their texts took, short texts before no long one.

A *flow* is what one caller has of one length: the short texts of a caller do not wait for the caller's own long ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain, zip_longest
from typing import NamedTuple

from .sequence import Sequence


class Flow(NamedTuple):
    """A share of the engine's time. `long`: its texts are decoded in chunks, one text at a time."""

    caller: str
    long: bool


class EmbeddingQueue:
    """Holds the texts that are not embedded yet, in progress or not."""

    def __init__(self, short_tokens: int) -> None:
        """Create an empty queue; a text of at most `short_tokens` tokens is short."""
        self._short_tokens = short_tokens
        self._texts: dict[Flow, deque[Sequence]] = {}
        self._used_s: dict[Flow, float] = {}  # time of the flow's texts, and what a new flow begins with

    def __len__(self) -> int:
        return sum(map(len, self._texts.values()))

    def __iter__(self) -> Iterator[Sequence]:
        return chain.from_iterable(self._texts.values())

    def append(self, text: Sequence) -> None:
        """Add a text behind those of its flow. A new flow has used as much as the least of the others, no less."""
        flow = self._flow(text)
        if flow not in self._texts:
            self._texts[flow] = deque()
            self._used_s[flow] = min(self._used_s.values(), default=0.0)
        self._texts[flow].append(text)

    def remove(self, text: Sequence) -> None:
        """Remove a text in any state."""
        flow = self._flow(text)
        self._texts[flow].remove(text)
        if not self._texts[flow]:
            del self._texts[flow], self._used_s[flow]

    def charge(self, text: Sequence, seconds: float) -> None:
        """Count time against the flow of a text."""
        self._used_s[self._flow(text)] += seconds

    def turns(self) -> Iterator[tuple[bool, Iterator[Sequence]]]:
        """Yield who may be next, the flow that used the least time first.

        Yields:
            Whether the texts are long, and texts in the order in which they may fill a batch: of a long flow its first
            text alone; of a short one also the short texts of other flows, one of each flow in turn.
        """
        flows = sorted(self._texts, key=self._used_s.__getitem__)
        short = [self._texts[flow] for flow in flows if not flow.long]
        for flow in flows:
            if flow.long:
                yield True, iter([self._texts[flow][0]])
            elif short:
                rounds = zip_longest(*short)
                yield False, (text for texts in rounds for text in texts if text is not None)
                short = []

    def _flow(self, text: Sequence) -> Flow:
        return Flow(text.job.caller, len(text.prompt) > self._short_tokens)
