"""Rows as a device hears them: spoken in English by espeak-ng in several voices, and transcribed by the device's own
speech model.

Synthetic speech is harder to transcribe than people's. It needs espeak-ng, the extra `voice`, and `causeway-models pull
speech`.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from causeway_server.models.catalog.artifact import find_signal
from causeway_server.models.parts.decoding.audio import decode_audio
from causeway_server.models.parts.process.messages import AudioTerms, Found, Transcribe, WorkerSpec
from causeway_server.router.parts.reading import spoken_form

from ..function_calls.dataset import Row
from ..function_calls.intents import is_device_row
from .corpus import Corpus

_MAX_S = 60.0
_LANGUAGE = "en"
_SOURCE = "hwu64"  # its commands were spoken by people; SNIPS was typed


class TranscribedRow(msgspec.Struct, frozen=True):
    """A row and its transcript. `heard`: text as the speech model writes it; `confidence`: of the transcript, 0
    to 1.
    """

    row: Row
    voice: str
    heard: str
    confidence: float

    @property
    def as_heard(self) -> Row:
        """The row with the transcript's words, in the spoken form that models read."""
        return msgspec.structs.replace(self.row, text=spoken_form(self.heard, _LANGUAGE))


def spoken_commands(corpus: Corpus) -> list[Row]:
    """Return the held-back rows that a person may say to the device."""
    return [row for row in corpus.validation if row.source == _SOURCE and is_device_row(row.source, row.intent)]


def transcribe_rows(
    rows: Sequence[Row],
    voices: Sequence[str],
    file: Path,
    speech: Path,
    *,
    espeak: Sequence[str] = ("espeak-ng",),
    progress: Callable[[str], None] = lambda _: None,
) -> list[TranscribedRow]:
    """Return a transcript of each row; the voices take turns.

    Args:
        file: JSON lines that store the transcripts, so that a second call resumes an interrupted one.
        speech: folder of the speech model.
        espeak: The command of espeak-ng.
    """
    known = _read(file)
    missing = [(row, voices[at % len(voices)]) for at, row in enumerate(rows) if row.text not in known]
    if missing:
        from causeway_server.models.parts.encoders.speech import SpeechEncoder  # the extra `voice`
        from causeway_server.models.parts.process.child import Link

        words = str(find_signal("heard-words").path)
        encoder = SpeechEncoder(WorkerSpec("", options={"model": str(speech), "words": words}))
        ours, theirs = socket.socketpair()
        link = Link(theirs)  # nothing is ever sent: no job is cancelled
        with ours, theirs, file.open("ab") as lines:
            for row, voice in missing:
                command = [*espeak, "-v", voice, "--stdin", "--stdout"]
                spoken = subprocess.run(command, input=row.text.encode(), capture_output=True, check=True)
                found = encoder.run(Transcribe(decode_audio(spoken.stdout, _MAX_S), AudioTerms(_LANGUAGE)), link)
                assert isinstance(found, Found)
                known[row.text] = TranscribedRow(row, voice, found.fact.text, found.fact.confidence)
                lines.write(msgspec.json.encode(known[row.text]) + b"\n")
                lines.flush()
                progress(f"{len(known)} of {len(rows)} rows are transcribed")
    return [known[row.text] for row in rows]


def _read(file: Path) -> dict[str, TranscribedRow]:
    if not file.is_file():
        return {}
    rows = [msgspec.json.decode(line, type=TranscribedRow) for line in file.read_bytes().splitlines()]
    return {one.row.text: one for one in rows}
