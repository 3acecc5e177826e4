"""The parsing of bodies of `/v1/audio/transcriptions` and `/v1/audio/speech`, and the encoding of transcripts. The body
of a transcription is a multipart form (RFC 7578), which is read as a whole.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from typing import Annotated, Final, Literal, get_args

import msgspec
from msgspec import Meta

from ..documents.data import table_of
from ..errors import InvalidRequest, MissingField, UnknownField, UnsupportedFeature, UnsupportedMediaType
from .request_body import check_encoding, load, too_deep, validate

_FORM = "multipart/form-data"
_MAX_FIELDS = 16
_MAX_BOUNDARY = 70  # RFC 2046


def check_form(content_type: str | None, content_encoding: str | None) -> None:
    """Raise UnsupportedMediaType unless the headers of these names (None: absent) declare an uncompressed form."""
    if content_type is None:
        raise UnsupportedMediaType(f"The body has no type. Send `Content-Type: {_FORM}`.")
    if content_type.partition(";")[0].strip().lower() != _FORM:
        raise UnsupportedMediaType(f"The body's type is {content_type[:64]!r}. Send `Content-Type: {_FORM}`.")
    check_encoding(content_encoding)


def parse_form(body: bytes, content_type: str) -> list[tuple[str, bytes]]:
    """Return the fields of a form, names with values. Raises InvalidRequest if it is malformed, or too long."""
    delimiter = b"\r\n--" + _boundary(content_type)
    _preamble, *fields = (b"\r\n" + body).split(delimiter, _MAX_FIELDS + 1)
    if not fields:
        raise _malformed()
    *fields, end = fields
    if not end.startswith(b"--"):
        raise InvalidRequest("The form has too many fields.") if len(fields) == _MAX_FIELDS else _malformed()
    return [_field(field) for field in fields]


def _boundary(content_type: str) -> bytes:
    from email.message import Message  # on demand: few requests are forms

    message = Message()
    message["Content-Type"] = content_type
    boundary = message.get_boundary("").encode("utf-8", "replace")
    if not 0 < len(boundary) <= _MAX_BOUNDARY:
        raise _malformed()
    return boundary


def _field(field: bytes) -> tuple[str, bytes]:
    """Read the text between two delimiters: padding, a line's end, headers, an empty line, the value."""
    from email.parser import HeaderParser
    from email.utils import collapse_rfc2231_value

    head, _, value = field.lstrip(b" \t").partition(b"\r\n\r\n")
    if not head.startswith(b"\r\n"):
        raise _malformed()
    headers = HeaderParser().parsestr(head[2:].decode("utf-8", "replace"))
    if headers.get_content_maintype() == "multipart":
        raise InvalidRequest("The form contains another form. Send plain fields.")
    name = headers.get_param("name", "", "content-disposition")
    return collapse_rfc2231_value(name), value


def _malformed() -> InvalidRequest:
    return InvalidRequest(f"The body is not valid {_FORM}.")


LANGUAGE_CODES: Final = table_of(__package__, "languages.json", dict[str, str])
"""The language codes that Whisper's models know, by English name in lower case; some languages have several names.

Source: the tables of https://github.com/openai/whisper/blob/main/whisper/tokenizer.py
"""


TranscriptFormat = Literal["json", "text", "srt", "verbose_json", "vtt"]
JSON_FORMATS: Final[tuple[TranscriptFormat, ...]] = ("json", "verbose_json")
"""The formats that are JSON; the others are plain text."""
_FORMATS: Final[tuple[TranscriptFormat, ...]] = get_args(TranscriptFormat)
_FIELDS: Final = frozenset({"file", "model", "language", "prompt", "response_format", "temperature", "stream"})
GRANULARITIES: Final = "timestamp_granularities[]"
OPENAI_MODEL: Final = "whisper-1"
"""The name that OpenAI's clients send for the model that transcribes audio."""
_LANGUAGE = re.compile(r"[a-z]{2,3}")
_MAX_PROMPT = 1000  # characters; Whisper reads the last 224 tokens
_MAX_NAME = 64
_encoder = msgspec.json.Encoder()


class TranscriptionRequest(msgspec.Struct, frozen=True):
    """A request to transcribe audio. `prompt`: preceding text, whose style and names the transcript follows."""

    data: bytes
    model: str
    language: str = ""  # ISO 639-1; "" to detect it
    prompt: str = ""
    format: TranscriptFormat = "json"
    temperature: float = 0.0
    stream: bool = False
    segments: bool = True  # whether segments with their times are requested, as `words` are, in `verbose_json`
    words: bool = False


class TranscriptSegment(msgspec.Struct, frozen=True):
    """A segment of a transcript. `logprob`: mean of tokens, natural log; `no_speech`: probability of no speech."""

    text: str
    start_s: float
    end_s: float
    logprob: float
    no_speech: float


class TranscriptWord(msgspec.Struct, frozen=True):
    text: str
    start_s: float
    end_s: float


class Transcript(msgspec.Struct, frozen=True):
    """The transcript of audio. `language`: ISO 639-1, "" without speech; `duration_s`: length of the whole audio.
    `words`: the words with their times, if they were requested.
    """

    text: str
    language: str
    duration_s: float
    segments: tuple[TranscriptSegment, ...] = ()
    words: tuple[TranscriptWord, ...] = ()


def parse_transcription(fields: Sequence[tuple[str, bytes]]) -> TranscriptionRequest:
    """Check the fields of the form, names with their values. InvalidRequest names a missing, unknown, repeated or wrong
    one; UnsupportedFeature: this server does not offer it.
    """
    values: dict[str, bytes] = {}
    granularities: set[bytes] = set()
    for name, value in fields:
        if name == GRANULARITIES:
            if value not in (b"segment", b"word"):
                raise InvalidRequest(f"`{name}` must be `segment` or `word`.", param=name)
            granularities.add(value)
        elif name not in _FIELDS:
            raise UnknownField(
                f"`{name[:64]}` is not a known field. Remove the field, or correct its name.", param=name[:64]
            )
        elif name in values:
            raise InvalidRequest(f"`{name}` is in the form twice. Send it once.", param=name)
        else:
            values[name] = value
    for name, advice in (("file", "Send the audio as a file."), ("model", "Send `speech` or `auto`.")):
        if name not in values:
            raise MissingField(f"`{name}` is missing. {advice}", param=name)
    stream = values.get("stream", b"").lower() not in (b"false", b"0", b"")
    if stream and values.get("response_format", b"json") not in (b"json", b"text"):
        raise UnsupportedFeature(
            "`response_format`: a stream has only words. Leave `response_format` out.", param="response_format"
        )
    if b"word" in granularities and values.get("response_format") != b"verbose_json":
        message = f"`{GRANULARITIES}`: words with their times need `response_format` `verbose_json`. Send that, too."
        raise InvalidRequest(message, param=GRANULARITIES)
    return TranscriptionRequest(
        data=values["file"],
        model=_text(values, "model", _MAX_NAME),
        language=_language(_text(values, "language", _MAX_NAME)),
        prompt=_text(values, "prompt", _MAX_PROMPT),
        format=_format(_text(values, "response_format", _MAX_NAME)),
        temperature=_temperature(_text(values, "temperature", _MAX_NAME)),
        stream=stream,
        segments=granularities != {b"word"},
        words=b"word" in granularities,
    )


def encode_transcript(transcript: Transcript, request: TranscriptionRequest) -> bytes:
    """Return the answer's body: JSON, the plain words with a newline, or subtitles with a cue per segment: SubRip for
    `srt`, https://www.w3.org/TR/webvtt1/ for `vtt`.
    """
    form = request.format
    if form == "text":
        return (transcript.text + "\n").encode()
    if form in ("srt", "vtt"):
        return _subtitles(transcript.segments, form).encode()
    usage = {"type": "duration", "seconds": round(transcript.duration_s, 3)}
    if form == "json":
        return _encoder.encode({"text": transcript.text, "usage": usage})
    body: dict[str, object] = {
        "task": "transcribe",
        "language": transcript.language,
        "duration": round(transcript.duration_s, 3),
        "text": transcript.text,
    }
    if request.segments:
        body["segments"] = [_segment(at, one, request.temperature) for at, one in enumerate(transcript.segments)]
    if request.words:
        body["words"] = [
            {"word": one.text, "start": round(one.start_s, 3), "end": round(one.end_s, 3)} for one in transcript.words
        ]
    return _encoder.encode(body | {"usage": usage})


def encode_delta(text: str) -> bytes:
    """Return the event for recognised words, with the space before them."""
    return _event({"type": "transcript.text.delta", "delta": text})


def encode_done(transcript: Transcript) -> bytes:
    """Return the last event of a streamed transcript."""
    usage = {"type": "duration", "seconds": round(transcript.duration_s, 3)}
    return _event({"type": "transcript.text.done", "text": transcript.text, "usage": usage})


def _event(document: dict[str, object]) -> bytes:
    return b"data: " + _encoder.encode(document) + b"\n\n"


def _segment(at: int, segment: TranscriptSegment, temperature: float) -> dict[str, object]:
    words = segment.text.encode()
    return {
        "id": at,
        "seek": 0,
        "start": round(segment.start_s, 3),
        "end": round(segment.end_s, 3),
        "text": segment.text,
        "tokens": [],
        "temperature": temperature,
        "avg_logprob": round(segment.logprob, 6),
        "compression_ratio": round(len(words) / len(zlib.compress(words)), 6),
        "no_speech_prob": round(segment.no_speech, 6),
    }


def _subtitles(segments: Sequence[TranscriptSegment], form: Literal["srt", "vtt"]) -> str:
    blocks = ["WEBVTT"] if form == "vtt" else []
    for number, one in enumerate(segments, 1):
        times = f"{_clock_time(one.start_s, form)} --> {_clock_time(one.end_s, form)}"
        text = " ".join(one.text.split())  # a blank line would end the cue
        if form == "vtt":
            text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        blocks.append(f"{times}\n{text}" if form == "vtt" else f"{number}\n{times}\n{text}")
    return "".join(f"{block}\n\n" for block in blocks)


def _clock_time(seconds: float, form: Literal["srt", "vtt"]) -> str:
    whole_s, ms = divmod(round(seconds * 1000), 1000)
    separator = "," if form == "srt" else "."
    return f"{whole_s // 3600:02}:{whole_s // 60 % 60:02}:{whole_s % 60:02}{separator}{ms:03}"


def _text(values: dict[str, bytes], name: str, longest: int) -> str:
    try:
        text = values.get(name, b"").decode()
    except UnicodeDecodeError:
        raise InvalidRequest(f"`{name}` is not UTF-8 text.", param=name) from None
    if len(text) > longest or "\0" in text:
        raise InvalidRequest(f"`{name}` must be text of at most {longest} characters.", param=name)
    return text


def _language(text: str) -> str:
    text = LANGUAGE_CODES.get(text.lower(), text.lower())
    if text and not _LANGUAGE.fullmatch(text):
        raise InvalidRequest(
            "`language` must be a code of ISO 639-1, such as `en`, or a language's English name.", param="language"
        )
    return text


def _format(text: str) -> TranscriptFormat:
    for form in _FORMATS:
        if form == (text or "json"):
            return form
    names = ", ".join(_FORMATS)
    raise UnsupportedFeature(
        f"`response_format`: {text!r:.32} is not supported. Send one of {names}.", param="response_format"
    )


def _temperature(text: str) -> float:
    try:
        value = float(text or 0.0)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 1.0:
        raise InvalidRequest("`temperature` must be a number from 0 to 1.", param="temperature")
    return value


AudioFormat = Literal["wav", "pcm"]
_AUDIO_FORMATS: Final[dict[str, AudioFormat]] = {"wav": "wav", "pcm": "pcm"}
_Name = Annotated[str, Meta(min_length=1, max_length=64)]


class SpeechRequest(msgspec.Struct, frozen=True):
    """A text to speak. `speed`: 1.0 is the voice's own."""

    text: str
    model: str
    voice: str
    format: AudioFormat = "wav"
    speed: float = 1.0


_ADVICE: Final = {
    "input": "Send a text of 1 to 4096 characters.",
    "voice": "Send a voice of the device, `auto` for its default, or the code of a language, such as `en-us`.",
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
    """Parse and validate a speech request; `response_format` is WAV by default. InvalidRequest names the wrong key;
    UnsupportedFeature: the request is valid, but this server does not offer it.
    """
    try:
        wire = validate(load(body), WireSpeech, _ADVICE)
    except RecursionError:
        raise too_deep() from None
    audio = _AUDIO_FORMATS.get(wire.response_format or "wav")
    if audio is None:
        raise UnsupportedFeature(
            f"`response_format`: {wire.response_format!r:.32} is not supported. Send `wav` or `pcm`.",
            param="response_format",
        )
    if wire.instructions:
        raise UnsupportedFeature(
            "This voice does not support `instructions`. Leave `instructions` out.", param="instructions"
        )
    if wire.stream_format not in (None, "audio"):
        raise UnsupportedFeature(
            "`stream_format` must be `audio`, because the audio is sent without events. Send `audio`, or leave "
            "`stream_format` out.",
            param="stream_format",
        )
    return SpeechRequest(wire.input, wire.model, wire.voice, audio, 1.0 if wire.speed is None else wire.speed)
