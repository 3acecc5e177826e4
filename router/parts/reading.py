"""Sound, pictures and files inside a chat request: their bytes. A URL of the network is refused, not fetched."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Collection, Sequence

import msgspec

from ..errors import InvalidRequest, MissingField, UnsupportedFeature
from ..types import AudioPart, FilePart, ImagePart, Modality, Part, Request, TextPart
from .uploads import NO_SOUND_DATA, NOT_READ_HERE, PREFIX

_DATA_URL = re.compile(r"data:(?P<type>[\w.+-]+/[\w.+-]+)(?:;[\w.+-]+=[\w.+-]+)*;base64,", re.ASCII)
_NAME_CHARACTERS = 100


class FoundPart(msgspec.Struct, frozen=True):
    """A part with its bytes. `message` and `index` are its place in the request, `path` the same for error messages."""

    message: int
    index: int
    path: str
    modality: Modality
    data: bytes
    sha256: str
    reader: Modality  # the branch that reads it: a file may be a picture


def has_parts(request: Request, kinds: Sequence[Modality]) -> bool:
    """Return whether a message holds a part of one of these kinds."""
    return any(
        modality_of(part) in kinds
        for message in request.messages
        if type(message.content) is tuple
        for part in message.content
    )


def first_part(request: Request, kinds: Collection[Modality] = ()) -> tuple[str, Modality]:
    """Return the place of the first part that is not text, ``messages[0].content[1]``, and its kind; "" for none.

    Args:
        kinds: parts of these are passed over.
    """
    for at, message in enumerate(request.messages):
        if type(message.content) is tuple:
            for index, part in enumerate(message.content):
                if not isinstance(part, TextPart) and (kind := modality_of(part)) not in kinds:
                    return f"messages[{at}].content[{index}]", kind
    return "", "text"


def text_bytes(request: Request, body_bytes: int) -> int:
    """Return how much of a request's body is text: all but its sounds, pictures and files."""
    parts = sum(
        _size(part) for message in request.messages if type(message.content) is tuple for part in message.content
    )
    return max(0, body_bytes - parts)


def find_parts(request: Request, kinds: Sequence[Modality], at_most: int) -> tuple[FoundPart, ...]:
    """Return the parts of these kinds, decoded from base64.

    Raises:
        InvalidRequest: a part is no base64, or there are more than `at_most` parts of all kinds.
        UnsupportedFeature: a part is elsewhere, at a URL.
    """
    places = [
        (at, index, part, modality)
        for at, message in enumerate(request.messages)
        if type(message.content) is tuple
        for index, part in enumerate(message.content)
        if (modality := modality_of(part)) != "text"
    ]
    if len(places) > at_most:
        at, index, *_ = places[at_most]
        path = f"messages[{at}].content[{index}]"
        raise InvalidRequest(
            f"`{path}`: at most {at_most} sounds, pictures and files are taken. Send fewer.", param=path
        )
    return tuple(_found(at, index, part, modality) for at, index, part, modality in places if modality in kinds)


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
            raise UnsupportedFeature(f"`{path}`: {NO_SOUND_DATA}", param=path)
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
        message = f"`{path}.file_data`: no data: URL in base64. Send `data:text/plain;base64,…`."
        raise InvalidRequest(message, param=f"{path}.file_data")
    return file.file_data, ""


def _data_url_head(url: str, path: str) -> int:
    match = _DATA_URL.match(url)
    if match is not None and match["type"].lower().startswith("image/"):
        return match.end()
    if url.startswith(PREFIX):
        raise UnsupportedFeature(f"`{path}`: {NOT_READ_HERE}", param=path)
    if not url.lower().startswith("data:"):
        raise UnsupportedFeature(f"`{path}`: nothing is fetched from the network. Send a data: URL.", param=path)
    raise InvalidRequest(f"`{path}`: no data: URL of a picture. Send `data:image/png;base64,…`.", param=path)


def _base64(text: str, path: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest(f"`{path}` is no base64. Send the file's bytes in base64.", param=path) from None
