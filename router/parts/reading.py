"""The reading of audio, images and files in a chat request, and their replacement by the encoders' results. Network
URLs are refused, not fetched. Fusion replaces a part by the text that encoders found, or by a marker of soft tokens. A
message that is only audio becomes its transcript as if it had been typed, so that a spoken command is constrained,
cached and counted like a typed one.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import unicodedata
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final, Literal

import msgspec

from ..errors import EncoderFailed, InvalidRequest, MissingField, UnsupportedFeature
from ..types import AudioPart, Fact, FilePart, ImagePart, Modality, Part, Request, TextPart, Transcripts
from .numbers import spell_numbers
from .uploads import NO_AUDIO_DATA, NOT_READ_HERE, PREFIX

_DATA_URL = re.compile(r"data:(?P<type>[\w.+-]+/[\w.+-]+)(?:;[\w.+-]+=[\w.+-]+)*;base64,", re.ASCII)
_NAME_CHARACTERS = 100


class FoundPart(msgspec.Struct, frozen=True):
    """A part with its bytes. `message` and `index`: its place in the request; `path`: that place in messages."""

    message: int
    index: int
    path: str
    modality: Modality
    data: bytes
    sha256: str
    reader: Modality  # branch that reads the part, since a file may be an image


def has_parts(request: Request, kinds: Sequence[Modality]) -> bool:
    """Return whether a message contains a part of one of these kinds."""
    return any(kind in kinds for *_, kind in _parts(request))


def count_parts(request: Request, kind: Modality) -> int:
    """Return the number of parts of this kind in all messages."""
    return sum(found == kind for *_, found in _parts(request))


def first_part(request: Request, kinds: Collection[Modality] = ()) -> tuple[str, Modality]:
    """Return place (``messages[0].content[1]``) and kind of the first part but text and `kinds`; "" without one."""
    for at, index, _, kind in _parts(request):
        if kind != "text" and kind not in kinds:
            return f"messages[{at}].content[{index}]", kind
    return "", "text"


def text_bytes(request: Request, body_bytes: int) -> int:
    """Return the number of bytes of a request's body without its audio, images and files."""
    for _, _, part, _ in _parts(request):
        body_bytes -= _size(part)
    return max(0, body_bytes)


def find_parts(request: Request, kinds: Sequence[Modality], at_most: int) -> tuple[FoundPart, ...]:
    """Return the parts of these kinds, decoded from base64. Raises InvalidRequest if a part is not base64, or there are
    more than `at_most` parts of all kinds; UnsupportedFeature if a part is given by a URL of the network.
    """
    places = [place for place in _parts(request) if place[3] != "text"]
    if len(places) > at_most:
        at, index, *_ = places[at_most]
        path = f"messages[{at}].content[{index}]"
        raise InvalidRequest(
            f"`{path}`: at most {at_most} audio, images and files are accepted. Send fewer.", param=path
        )
    return tuple(_found(at, index, part, modality) for at, index, part, modality in places if modality in kinds)


def images_of(request: Request) -> tuple[str, ...]:
    """Return the images of a request whose parts have been checked, in base64."""
    found = (part for _, _, part, _ in _parts(request) if isinstance(part, ImagePart))
    return tuple(part.url.partition(",")[2] for part in found)


def _parts(request: Request) -> Iterator[tuple[int, int, Part, Modality]]:
    """Yield the parts of all messages: message index, index in the message, part and kind."""
    for at, message in enumerate(request.messages):
        if type(message.content) is tuple:
            for index, part in enumerate(message.content):
                yield at, index, part, modality_of(part)


def _size(part: Part) -> int:
    if isinstance(part, FilePart):
        return len(part.document)
    return len(part.url) if isinstance(part, ImagePart) else len(part.data) if isinstance(part, AudioPart) else 0


def modality_of(part: Part) -> Modality:
    if isinstance(part, TextPart):
        return "text"
    return "image" if isinstance(part, ImagePart) else "audio" if isinstance(part, AudioPart) else "file"


def _found(at: int, index: int, part: Part, modality: Modality) -> FoundPart:
    path, reader = f"messages[{at}].content[{index}]", modality
    if isinstance(part, AudioPart):
        path += ".input_audio.data"
        if part.data.startswith(PREFIX):
            raise UnsupportedFeature(f"`{path}`: {NO_AUDIO_DATA}", param=path)
        data = _base64(part.data, path)
    elif isinstance(part, ImagePart):
        path += ".image_url.url"
        data = _base64(part.url[_data_url_head(part.url, path) :], path)
    else:
        assert isinstance(part, FilePart)
        encoded, media_type = _file_data(part, f"{path}.file")
        path += ".file.file_data"
        data = _base64(encoded, path)
        reader = "image" if media_type.startswith("image/") and "svg" not in media_type else "file"
    return FoundPart(at, index, path, modality, data, hashlib.sha256(data).hexdigest(), reader)


class _SentFile(msgspec.Struct):
    """OpenAI's `file` object. `file_data`: a data: URL, or base64 alone."""

    file_data: str = ""
    file_id: str | None = None
    filename: str | None = None


def file_name(part: FilePart) -> str:
    """Return the name that the client gives the file, on one line; "" if there is none."""
    return " ".join((msgspec.json.decode(part.document, type=_SentFile).filename or "").split())[:_NAME_CHARACTERS]


def _file_data(part: FilePart, path: str) -> tuple[str, str]:
    """Return the base64 and the media type ("" if it is not given)."""
    try:
        file = msgspec.json.decode(part.document, type=_SentFile)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"`{path}`: {error}. Send `file_data` and `filename`.", param=path) from None
    if not file.file_data:
        if file.file_id:
            raise UnsupportedFeature(f"`{path}.file_id`: {NOT_READ_HERE}", param=f"{path}.file_id")
        raise MissingField(f"`{path}.file_data` is missing. Send a data: URL.", param=f"{path}.file_data")
    match = _DATA_URL.match(file.file_data)
    if match is not None:
        return file.file_data[match.end() :], match["type"].lower()
    if ":" in file.file_data[:16]:
        message = f"`{path}.file_data` is not a data: URL in base64. Send `data:text/plain;base64,…`."
        raise InvalidRequest(message, param=f"{path}.file_data")
    return file.file_data, ""


def _data_url_head(url: str, path: str) -> int:
    match = _DATA_URL.match(url)
    if match is not None and match["type"].lower().startswith("image/"):
        return match.end()
    if url.startswith(PREFIX):
        raise UnsupportedFeature(f"`{path}`: {NOT_READ_HERE}", param=path)
    if not url.lower().startswith("data:"):
        raise UnsupportedFeature(
            f"`{path}`: this server does not fetch from the network. Send a data: URL.", param=path
        )
    raise InvalidRequest(f"`{path}` is not a data: URL of an image. Send `data:image/png;base64,…`.", param=path)


def _base64(text: str, path: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest(f"`{path}` is not base64. Send the file's bytes in base64.", param=path) from None


Facts = Mapping[tuple[int, int], Fact | None]
"""The facts by message and index of the part; None if its encoder found nothing in time."""
Markers = Mapping[tuple[int, int], str]
"""The markers of soft tokens in the text, by message and index of the part; "" if the tokens are not ready in time."""

Form = Transcripts | Literal["digits"]
"""The form of transcripts in a request; `digits`: as `spoken`, with its numbers in digits."""
EXAMINED: Final[tuple[Form, ...]] = ("digits", "written")
"""The forms that the guard's detectors read: `written` has addresses, and groups of digits are adjacent in `digits`.
They find no number in the words of `spoken`.
"""

_NO_MARKERS: Markers = {}
_WORDS: Mapping[Modality, tuple[str, str]] = {
    "image": ("An image", "text in it"),
    "audio": ("An audio clip", "words in it"),
    "file": ("A file", "text in it"),
}


def fuse(
    request: Request,
    facts: Facts,
    kinds: Sequence[Modality],
    transcripts: Form = "written",
    markers: Markers = _NO_MARKERS,
) -> Request:
    """Return the request with its parts of these kinds as text. `transcripts`: the form of a message that is only
    audio; `markers` stand for parts that reach the model as soft tokens. Raises InvalidRequest if the last message is
    only audio, without speech; EncoderFailed if it has no content left.
    """
    last = len(request.messages) - 1
    content = request.messages[last].content
    if type(content) is tuple:
        _check_last(last, content, facts, kinds, markers)
    messages = list(request.messages)
    for at, message in enumerate(request.messages):
        parts, fact = message.content, facts.get((at, 0))
        if type(parts) is not tuple:
            continue
        if len(parts) == 1 and "audio" in kinds and isinstance(parts[0], AudioPart) and fact and fact.text:
            language = fact.language if transcripts == "spoken" else ""
            words = fact.text if transcripts == "written" else spoken_form(fact.text, language)
            messages[at] = msgspec.structs.replace(message, content=words)
        else:
            fused = tuple(_fused(part, (at, index), facts, kinds, markers) for index, part in enumerate(parts))
            messages[at] = msgspec.structs.replace(message, content=fused)
    return msgspec.structs.replace(request, messages=tuple(messages))


def _check_last(at: int, content: tuple[Part, ...], facts: Facts, kinds: Sequence[Modality], markers: Markers) -> None:
    left: list[object] = []
    for index, part in enumerate(content):
        if isinstance(part, TextPart):
            left.append(part.text)
        elif (at, index) in markers:
            left.append(markers[at, index])
        else:
            left.append(modality_of(part) not in kinds or facts.get((at, index)))
    if not any(left):
        raise EncoderFailed("No part of the last message could be read in time. Send the message again.", phase="send")
    fact = facts.get((at, 0))
    if len(content) == 1 and "audio" in kinds and isinstance(content[0], AudioPart) and fact is not None:
        path = f"messages[{at}].content[0].input_audio.data"
        if not fact.text:
            raise InvalidRequest(f"`{path}`: the audio contains no speech. Send speech, or add a text.", param=path)


def _fused(part: Part, place: tuple[int, int], facts: Facts, kinds: Sequence[Modality], markers: Markers) -> Part:
    modality = modality_of(part)
    if place in markers:
        return TextPart(markers[place] or _in_words(part, modality, None))
    return TextPart(_in_words(part, modality, facts.get(place))) if modality in kinds else part


def _in_words(part: Part, modality: Modality, fact: Fact | None) -> str:
    kind, what = _WORDS[modality]
    if isinstance(part, FilePart) and (name := file_name(part)):
        kind = f"{kind} named {name}"
    if fact is None:
        return f"[{kind} that could not be read.]"
    if not fact.text:
        return f"[{kind} without {what}.]"
    sure = "" if modality == "file" and fact.confidence == 1.0 else f", with confidence {fact.confidence:.2f}"
    return f"[{kind}; {what}{sure}:\n{fact.text}\n]"


_DOTTED = re.compile(r"\b(?:[^\W\d_]\.\s?){2,}")  # a.m., U.S.A., J. K.
_SIGNS = {"%": " percent", "&": " and ", "+": " plus "}
_SIGN = re.compile("[" + "".join(map(re.escape, _SIGNS)) + "]")
_KEPT = "'.,:"  # within words and numbers: don't, 3.5, 6:30
_OUTSIDE = re.compile(r"(?<![^\W\d_])'|'(?![^\W\d_])|(?<!\d)[.,:]|[.,:](?!\d)")


def spoken_form(text: str, language: str = "") -> str:
    """Return the words of a transcript in lower case, with single spaces; the text itself if it has no words. A model
    that was trained on this form (`transcripts: spoken` in its manifest) misreads another's "Wake me up at 6:30 a.m.!".

    Args:
        language: ISO 639-1, "" if it is not known. English numbers become words.
    """
    lower = text.lower().replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
    joined = _DOTTED.sub(lambda match: re.sub(r"[.\s]", "", match[0]) + " ", lower)
    named = _SIGN.sub(lambda match: _SIGNS[match[0]], joined)
    plain = "".join(" " if _is_mark(character) else character for character in named)
    words = " ".join(_OUTSIDE.sub(" ", plain).split()) or text
    return spell_numbers(words) if language == "en" else words


def _is_mark(character: str) -> bool:
    return character not in _KEPT and unicodedata.category(character)[0] in "PSC"
