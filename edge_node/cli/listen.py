"""`causeway-edge listen`: send a sound to the running daemon; show its transcript, the answer, its route and times."""

from __future__ import annotations

import base64
import io
import json
import sys
import wave
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from causeway import Causeway, CausewayAPIError, RequestOptions

from .ask import answer_document, run, write_answer
from .options import usage_error

_RATE = 16_000  # Hz
_MAX_BYTES = 64 * 1024 * 1024
_NO_MICROPHONE = (
    "give a WAV file, or `-` for stdin; a microphone needs `pip install 'causeway[microphone]'` and PortAudio"
)


def read_sound(source: str, seconds: float) -> bytes:
    """Return a sound as a file; exit with status 2 where there is none.

    Args:
        source: the path of a file; "-" for stdin, "" for the microphone.
        seconds: how long the microphone is recorded.
    """
    if not source:
        return _record(seconds)
    try:
        data = sys.stdin.buffer.read(_MAX_BYTES + 1) if source == "-" else Path(source).read_bytes()
    except OSError as error:
        usage_error(f"{source}: {error.strerror}")
    name = "stdin" if source == "-" else source
    if not data:
        usage_error(f"{name}: the sound is empty")
    if len(data) > _MAX_BYTES:
        usage_error(f"{name}: larger than {_MAX_BYTES // 1024 // 1024} MiB; send it in pieces")
    return data


def listen(
    causeway: Causeway, sound: bytes, arguments: RequestOptions, *, as_json: bool, out: TextIO, console: Console
) -> int:
    """Send a sound as a message; write the answer to `out`, the transcript and the times to the console.

    Returns:
        The exit code, as of `ask`.
    """

    def send() -> None:
        part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(sound).decode(), "format": "wav"}}
        answer = causeway.chat([{"role": "user", "content": [part]}], **arguments)
        transcript, parts = _transcript(causeway, sound), _parts(causeway, answer.decision.id)
        if as_json:
            document = {"transcript": transcript, "parts": parts, **answer_document(answer)}
            out.write(json.dumps(document, ensure_ascii=False) + "\n")
            return
        words = transcript or "none: this box understands no speech"
        for line in (f"transcript  {words}", *map(_line, parts)):
            console.print(Text(line), soft_wrap=True)
        write_answer(answer, out, console)

    return run(send, console)


def _transcript(causeway: Causeway, sound: bytes) -> str:
    """The words, in the form that people read; "" on a box without an encoder, whose target took the sound itself."""
    try:
        return causeway.transcribe(sound)
    except CausewayAPIError:
        return ""


def _parts(causeway: Causeway, decision_id: str) -> list[dict[str, Any]]:
    """What the decision record says of the sound."""
    record: Any = causeway.decision(decision_id)
    return [dict(part) for part in record["parts"]]


def _line(part: dict[str, Any]) -> str:
    sure = "" if part["confidence"] is None else f" · confidence {part['confidence']:.2f}"
    return f"            {part['status']}{' · known' if part['cached'] else ''} · {part['duration_ms']:.0f} ms{sure}"


def _record(seconds: float) -> bytes:
    """Record the microphone; exit with status 2 where there is none."""
    try:
        import sounddevice
    except (ModuleNotFoundError, OSError):  # OSError: no PortAudio
        usage_error(_NO_MICROPHONE)
    try:
        print(f"listening for {seconds:g} s", file=sys.stderr)
        samples = sounddevice.rec(round(seconds * _RATE), samplerate=_RATE, channels=1, dtype="int16")
        sounddevice.wait()
    except sounddevice.PortAudioError as error:
        usage_error(f"the microphone does not answer ({error}): {_NO_MICROPHONE}")
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(_RATE)
        writer.writeframes(samples.tobytes())
    return file.getvalue()
