"""The bounds of a session, and what its caller has to do after an event of the client."""

from __future__ import annotations

import msgspec

from ..types import Request
from .response import ResponseStream


class SessionLimits(msgspec.Struct, frozen=True):
    """Bounds of one session. `replay_bytes`: of the sent events that are kept for a cut connection.

    `max_audio_s`: of the sounds of its conversation together, and of the one that is sent; 0: it takes none.
    `speaks`: whether its answers may be spoken.
    """

    max_items: int = 256
    max_bytes: int = 256 * 1024
    replay_bytes: int = 256 * 1024
    max_audio_s: float = 0.0
    max_sounds: int = 8
    speaks: bool = False


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


class HearSound(msgspec.Struct, frozen=True):
    """Find out what is said in a sound, and tell `RealtimeSession.heard` or `not_heard`.

    `index`: its place in the item's content; `wav`: a WAV file in base64.
    """

    item_id: str
    index: int
    wav: str


Effect = StartResponse | CancelResponse | HearSound
