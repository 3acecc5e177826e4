"""The audio of a session until it becomes an item, by the client's commit or as a detected turn.

Positions are bytes since the session began, counted over all audio that its client sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal

import msgspec

from .audio import BYTES_PER_S, AudioBuffer
from .response import DetectSpeech, TranscribePartial
from .wire import ServerVAD

WINDOW_MS: Final = 32
_ONSET: Final = 2  # consecutive windows of speech that begin a turn; a single one may be a click
_BAND: Final = 0.15  # silence is a probability that lies this much below the threshold
_MIN_SILENCE: Final = 0.01

Change = Literal["started", "stopped"]


class TurnDetector:
    """Detects the start and end of turns from the probability of speech in each window of audio. Time is counted in
    windows, never by a clock, because a client may send audio faster or slower than it was spoken.
    """

    def __init__(self, settings: ServerVAD) -> None:
        self._speech = settings.threshold
        self._silence = max(settings.threshold - _BAND, _MIN_SILENCE)
        self._silent_ms = settings.silence_duration_ms
        self.windows_before = -(-settings.prefix_padding_ms // WINDOW_MS) + _ONSET
        """The number of windows of a turn at its start: its padding and its onset."""
        self._onset = 0
        self._quiet = 0
        self.speaking = False

    def take(self, probability: float) -> Change | None:
        """Judge the next window. Returns the change that it causes."""
        if not self.speaking:
            self._onset = self._onset + 1 if probability >= self._speech else 0
            if self._onset < _ONSET:
                return None
            self.speaking, self._onset, self._quiet = True, 0, 0
            return "started"
        if probability >= self._speech:
            self._quiet = 0
        elif self._quiet or probability < self._silence:  # between the thresholds silence only continues
            self._quiet += 1
        if not self._quiet or self._quiet * WINDOW_MS < self._silent_ms:
            return None
        self.end()
        return "stopped"

    def end(self) -> None:
        """End the turn, if there is one."""
        self.speaking, self._onset, self._quiet = False, 0, 0


_BYTES_PER_MS: Final = BYTES_PER_S // 1000
_WINDOW: Final = WINDOW_MS * _BYTES_PER_MS
_PUNCTUATION: Final = ".,;:!?\u2026\"'()-"


class TurnStarted(msgspec.Struct, frozen=True):
    """The start of a turn. `at_ms`: the beginning of its audio; `item_id`: the id of its item."""

    item_id: str
    at_ms: int


class TurnEnded(msgspec.Struct, frozen=True):
    """The end of a turn. `at_ms`: the end of its audio; `wav`: the audio, a WAV file in base64."""

    item_id: str
    at_ms: int
    wav: str


class SpokenInput:
    """The audio that is not an item yet, with the state of turn detection and partial transcripts.
    `partial_interval_s`: length of new audio between two partial transcripts; 0: there are none.
    """

    def __init__(self, audio: AudioBuffer, next_item_id: Callable[[], str], partial_interval_s: float = 0.0) -> None:
        self._audio = audio
        self._next_item_id = next_item_id
        self._settings: ServerVAD | None = None
        self._turns: TurnDetector | None = None
        self._state = b""  # the detector's state after the newest judged window
        self._judged_to = 0
        self._item_id = ""  # id of the turn in progress
        self._partial_bytes = round(partial_interval_s * BYTES_PER_S)
        self._transcribed_to = 0
        self._certain = StablePrefix()

    def configure(self, settings: ServerVAD | None) -> None:
        """Detect turns with these settings in later audio; None if the client marks the end of turns."""
        if settings != self._settings:
            self._settings = settings
            self._turns = None if settings is None else TurnDetector(settings)
            self._judged_to = self._audio.end

    def append(self, encoded: str) -> DetectSpeech | None:
        """Append audio; return the windows in which to detect speech. Raises InvalidRequest or BufferFull."""
        if self._turns is None:
            self._audio.append(encoded)
            return None
        self._audio.append(encoded, self._judged_to)
        whole = (self._audio.end - self._judged_to) // _WINDOW * _WINDOW
        if not whole:
            return None
        pcm = self._audio.pcm(self._judged_to, self._judged_to + whole)
        return DetectSpeech(pcm, self._state, self._judged_to)

    def judged(
        self, detection: DetectSpeech, probabilities: Sequence[float], state: bytes
    ) -> list[TurnStarted | TurnEnded]:
        """Process the probability of speech in each window. Returns the starts and ends of turns in them, in order."""
        if self._turns is None or detection.at != self._judged_to:
            return []  # the audio was cleared or committed meanwhile, or turn detection was turned off
        self._state = state
        changes: list[TurnStarted | TurnEnded] = []
        for probability in probabilities:
            self._judged_to += _WINDOW
            change = self._turns.take(probability)
            if change == "started":
                changes.append(self._start(self._turns.windows_before))
            elif change == "stopped" or (self._turns.speaking and self._is_longest):
                changes.append(self._end())
        if not self._turns.speaking:
            self._audio.drop_to(self._judged_to - self._turns.windows_before * _WINDOW)
        return changes

    def partial(self) -> TranscribePartial | None:
        """Return the audio of the turn in progress, if enough of it is new."""
        end = self._audio.end if self._turns is None else self._judged_to
        new = end - max(self._transcribed_to, self._audio.start)
        if not self._partial_bytes or new < self._partial_bytes or not (self._turns is None or self._turns.speaking):
            return None
        self._transcribed_to = end
        self._item_id = self._item_id or self._next_item_id()
        return TranscribePartial(self._item_id, self._audio.file(end))

    def partly_transcribed(self, partial: TranscribePartial, transcript: str) -> str:
        """Process a partial transcript. Returns the newly stable words."""
        return self._certain.take(transcript) if partial.item_id == self._item_id else ""

    def whole(self) -> tuple[str, str]:
        """Return the id of the item that all audio becomes, and its WAV file in base64. Raises BufferEmpty."""
        wav = self._audio.wav()
        return self._item_id or self._next_item_id(), wav

    def clear(self) -> None:
        """Drop the audio, and end a turn in progress."""
        self._audio.drop_to(self._audio.end)
        self._over()
        self._judged_to = self._audio.end

    @property
    def _is_longest(self) -> bool:
        return self._judged_to + _WINDOW - self._audio.start > self._audio.max_bytes

    def _start(self, windows_before: int) -> TurnStarted:
        self._audio.drop_to(self._judged_to - windows_before * _WINDOW)
        self._item_id = self._next_item_id()
        return TurnStarted(self._item_id, self._audio.start // _BYTES_PER_MS)

    def _end(self) -> TurnEnded:
        wav = self._audio.wav(self._judged_to)
        ended = TurnEnded(self._item_id, self._judged_to // _BYTES_PER_MS, wav)
        self._audio.drop_to(self._judged_to)
        self._over()
        return ended

    def _over(self) -> None:
        self._item_id = ""
        self._certain = StablePrefix()
        if self._turns is not None:
            self._turns.end()


class StablePrefix:
    """The stable prefix of partial transcripts. The last words of a partial transcript are uncertain. Words are stable
    once two consecutive transcripts, the second of longer audio, agree on them; they are returned once and never taken
    back (local agreement, as in Whisper-Streaming: https://aclanthology.org/2023.ijcnlp-demo.3).
    """

    def __init__(self) -> None:
        self._newest: list[str] = []
        self._words_sent = 0  # words

    def take(self, transcript: str) -> str:
        """Take the transcript of the audio so far. Returns the newly stable text."""
        words = transcript.split()
        agreed = 0
        for before, now in zip(self._newest, words, strict=False):
            if _bare(before) != _bare(now):
                break
            agreed += 1
        self._newest = words
        new = " ".join(words[self._words_sent : agreed])
        text = f" {new}" if new and self._words_sent else new
        self._words_sent = max(self._words_sent, agreed)
        return text


def _bare(word: str) -> str:
    return word.strip(_PUNCTUATION).casefold()
