"""`POST /v1/audio/speech`: its body → `SpeechRequest`."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from ...errors import UnsupportedFeature
from ..request_body import load, too_deep, validate

SoundFormat = Literal["wav", "pcm"]
_FORMATS: Final[dict[str, SoundFormat]] = {"wav": "wav", "pcm": "pcm"}
_Name = Annotated[str, Meta(min_length=1, max_length=64)]


class SpeechRequest(msgspec.Struct, frozen=True):
    """A text to speak. `speed`: 1.0 is the voice's own."""

    text: str
    model: str
    voice: str
    format: SoundFormat = "wav"
    speed: float = 1.0


_ADVICE: Final = {
    "input": "Send a text of 1 to 4096 characters.",
    "voice": "Send a voice of the box, `auto` for its default, or the code of a language, such as `en-us`.",
    "speed": "Send a number from 0.25 to 4.",
}


class WireSpeech(msgspec.Struct, forbid_unknown_fields=True):
    input: Annotated[str, Meta(min_length=1, max_length=4096)]
    model: _Name
    voice: _Name
    response_format: str | None = None
    speed: Annotated[float, Meta(ge=0.25, le=4.0)] | None = None
    instructions: str | None = None
    stream_format: str | None = None


def parse_speech(body: bytes) -> SpeechRequest:
    """Parse and validate a speech request; without `response_format` it asks for WAV.

    Raises:
        InvalidRequest: names the key that is wrong.
        UnsupportedFeature: what it asks for is valid, but not made here.
    """
    try:
        wire = validate(load(body), WireSpeech, _ADVICE)
    except RecursionError:
        raise too_deep() from None
    sound = _FORMATS.get(wire.response_format or "wav")
    if sound is None:
        raise UnsupportedFeature(
            f"`response_format`: {wire.response_format!r:.32} is not made here. Send `wav` or `pcm`.",
            param="response_format",
        )
    if wire.instructions:
        raise UnsupportedFeature("`instructions`: this voice takes none. Leave them out.", param="instructions")
    if wire.stream_format not in (None, "audio"):
        raise UnsupportedFeature(
            "`stream_format`: the sound is sent as it is. Send `audio`, or leave it out.", param="stream_format"
        )
    return SpeechRequest(wire.input, wire.model, wire.voice, sound, 1.0 if wire.speed is None else wire.speed)
