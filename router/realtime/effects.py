"""The bounds of a session, and what its caller has to do after an event of the client."""

from __future__ import annotations

import msgspec

from ..types import Request
from .response import ResponseStream


class SessionLimits(msgspec.Struct, frozen=True):
    """Bounds of one session. `replay_bytes`: of the sent events that are kept for a cut connection.

    `max_audio_s`: of the sounds of its conversation together, and of the one that is sent; 0: it takes none.
    `speaks`: whether its answers may be spoken; `voice`: by which, where the client names none.
    `detects_turns`: whether turns may be detected in its sound.
    `partial_s`: new sound between two transcripts of a sound that goes on; 0: it has none.
    """

    max_items: int = 256
    max_bytes: int = 256 * 1024
    replay_bytes: int = 256 * 1024
    max_audio_s: float = 0.0
    max_sounds: int = 8
    speaks: bool = False
    voice: str = "en-us"
    detects_turns: bool = False
    partial_s: float = 0.0


class Voice(msgspec.Struct, frozen=True):
    """How an answer is spoken. `speed`: 1.0 is the voice's own."""

    name: str
    speed: float


class StartResponse(msgspec.Struct, frozen=True):
    """Answer `request` into `response`, whose id is ``resp_`` and `id`. `voice`: None: it is text."""

    id: str
    request: Request
    response: ResponseStream
    size_bytes: int  # of the request as a body of HTTP
    voice: Voice | None = None


class CancelResponse(msgspec.Struct, frozen=True):
    """Stop answering; the client has been told."""


class TranscribeSound(msgspec.Struct, frozen=True):
    """Transcribe a sound, and tell `RealtimeSession.transcribed` or `not_transcribed`.

    `index`: its place in the item's content; `wav`: a WAV file in base64.
    """

    item_id: str
    index: int
    wav: str


class TranscribePartial(msgspec.Struct, frozen=True):
    """Transcribe a sound that goes on, unless other requests would wait for it. `wav`: a WAV file."""

    item_id: str
    wav: bytes


class DetectSpeech(msgspec.Struct, frozen=True):
    """Detect speech in the windows of a sound, and tell `RealtimeSession.detected` or `not_detected`.

    `pcm`: 16-bit PCM at 24 kHz, windows of 32 ms; `state`: of the detector, after the window before; `at`: where the
    sound begins.
    """

    pcm: bytes
    state: bytes
    at: int


Effect = StartResponse | CancelResponse | TranscribeSound | DetectSpeech
