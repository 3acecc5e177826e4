"""Tokens' bytes to text: characters whole, stop strings never shown, not even their beginning."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

_decoder = codecs.getincrementaldecoder("utf-8")


class TextStream:
    """The text of one sequence. After `stopped` nothing more is to be fed."""

    __slots__ = ("_decode", "_held", "_longest", "_stops", "made", "shown", "stopped")

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._longest = max(map(len, self._stops), default=0)
        self._decode = _decoder(errors="replace")
        self._held = ""
        self.made = 0  # characters fed so far
        self.shown = 0  # characters given out so far
        self.stopped = False

    def feed(self, piece: bytes) -> str:
        """What can be shown now that these bytes came."""
        return self._show(self._decode.decode(piece))

    def finish(self) -> str:
        """The rest at the end: what was held back did not become a stop string, half a character becomes U+FFFD."""
        text = self._show(self._decode.decode(b"", final=True))
        if self.stopped:
            return text
        held, self._held = self._held, ""
        self.shown += len(held)
        return text + held

    @property
    def clean(self) -> bool:
        """Nothing is held and nothing can be: a token's own text is what it adds."""
        return not self._stops and not self._decode.getstate()[0]

    def _show(self, text: str) -> str:
        self.made += len(text)
        if self._stops:
            text = self._held + text
            ends = [place for place in map(text.find, self._stops) if place >= 0]
            if ends:
                self.stopped, self._held = True, ""
                text = text[: min(ends)]
            else:
                keep = self._possible_stop(text)
                text, self._held = text[: len(text) - keep], text[len(text) - keep :]
        self.shown += len(text)
        return text

    def _possible_stop(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string begins."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
