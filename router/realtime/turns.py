"""Where turns of speech begin and end in a sound, by the probability of speech in each of its windows.

Time is counted in windows of the sound, never by a clock: a client may send it faster or slower than it was spoken.
"""

from __future__ import annotations

from typing import Final, Literal

from .wire import ServerVAD

WINDOW_MS: Final = 32
_ONSET: Final = 2  # windows of speech in a row that begin a turn: one alone may be a click
_BAND: Final = 0.15  # by how much the probability of silence is below the threshold
_LEAST: Final = 0.01

Change = Literal["started", "stopped"]


class TurnDetector:
    """Judges one window after the other.

    Args:
        settings: threshold and length of the silence that ends a turn.
    """

    def __init__(self, settings: ServerVAD) -> None:
        self._speech = settings.threshold
        self._silence = max(settings.threshold - _BAND, _LEAST)
        self._silent_ms = settings.silence_duration_ms
        self.windows_before = -(-settings.prefix_padding_ms // WINDOW_MS) + _ONSET
        """How many windows a turn has when it starts: its padding and its onset."""
        self._onset = 0
        self._quiet = 0
        self.speaking = False

    def take(self, probability: float) -> Change | None:
        """Judge the next window. Returns what it changes."""
        if not self.speaking:
            self._onset = self._onset + 1 if probability >= self._speech else 0
            if self._onset < _ONSET:
                return None
            self.speaking, self._onset, self._quiet = True, 0, 0
            return "started"
        if probability >= self._speech:
            self._quiet = 0
        elif self._quiet or probability < self._silence:  # between the two: silence goes on, and does not begin
            self._quiet += 1
        if not self._quiet or self._quiet * WINDOW_MS < self._silent_ms:
            return None
        self.end()
        return "stopped"

    def end(self) -> None:
        """End the turn, if there is one."""
        self.speaking, self._onset, self._quiet = False, 0, 0
