"""Tokens' bytes to text: whole characters only, and nothing of a stop string, not even its beginning."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

_decoder = codecs.getincrementaldecoder("utf-8")


class TextStream:
    """The text of one sequence. Once `stopped` is set, nothing more may be fed."""

    __slots__ = ("_decode", "_held", "_max_stop", "_stops", "received", "shown", "stopped")

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._max_stop = max(map(len, self._stops), default=0)
        self._decode = _decoder(errors="replace")
        self._held = ""
        self.received = 0  # characters fed so far
        self.shown = 0  # characters returned so far
        self.stopped = False

    def feed(self, piece: bytes) -> str:
        """Add a token's bytes; return the text that can be shown now."""
        return self._show(self._decode.decode(piece))

    def finish(self) -> str:
        """Return the rest at the end: held-back text that is not a stop string; half a character becomes U+FFFD."""
        text = self._show(self._decode.decode(b"", final=True))
        if self.stopped:
            return text
        held, self._held = self._held, ""
        self.shown += len(held)
        return text + held

    @property
    def clean(self) -> bool:
        """Nothing is held back and nothing can be: a token adds exactly its own text."""
        return not self._stops and not self._decode.getstate()[0]

    def _show(self, text: str) -> str:
        self.received += len(text)
        if self._stops:
            text = self._held + text
            ends = [at for at in map(text.find, self._stops) if at >= 0]
            if ends:
                self.stopped, self._held = True, ""
                text = text[: min(ends)]
            else:
                keep = self._possible_stop(text)
                text, self._held = text[: len(text) - keep], text[len(text) - keep :]
        self.shown += len(text)
        return text

    def _possible_stop(self, text: str) -> int:
        """Return the length of the longest suffix of `text` with which a stop string begins."""
        for length in range(min(self._max_stop - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
