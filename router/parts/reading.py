"""Sound and pictures inside a chat request: their bytes. A URL of the network is refused, not fetched."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Sequence

import msgspec

from ..errors import InvalidRequest, UnsupportedFeature
from ..types import AudioPart, ImagePart, Modality, Part, Request, TextPart

_DATA_URL = re.compile(r"data:(?P<type>[\w.+-]+/[\w.+-]+)(?:;[\w.+-]+=[\w.+-]+)*;base64,", re.ASCII)


class FoundPart(msgspec.Struct, frozen=True):
    """A part with its bytes. `message` and `index` are its place in the request, `path` the same for error messages."""

    message: int
    index: int
    path: str
    modality: Modality
    data: bytes
    sha256: str


def has_parts(request: Request, kinds: Sequence[Modality]) -> bool:
    """Return whether a message holds a part of one of these kinds."""
    return any(
        modality_of(part) in kinds
        for message in request.messages
        if type(message.content) is tuple
        for part in message.content
    )


def find_parts(request: Request, kinds: Sequence[Modality], at_most: int) -> tuple[FoundPart, ...]:
    """Return the parts of these kinds, decoded from base64.

    Raises:
        InvalidRequest: a part is no base64, or there are more than `at_most`.
        UnsupportedFeature: a part is elsewhere, at a URL.
    """
    places = [
        (at, index, part, modality)
        for at, message in enumerate(request.messages)
        if type(message.content) is tuple
        for index, part in enumerate(message.content)
        if (modality := modality_of(part)) in kinds
    ]
    if len(places) > at_most:
        at, index, *_ = places[at_most]
        path = f"messages[{at}].content[{index}]"
        raise InvalidRequest(f"`{path}`: at most {at_most} sounds and pictures are taken. Send fewer.", param=path)
    return tuple(_found(at, index, part, modality) for at, index, part, modality in places)


def modality_of(part: Part) -> Modality:
    if isinstance(part, TextPart):
        return "text"
    return "image" if isinstance(part, ImagePart) else "audio" if isinstance(part, AudioPart) else "file"


def _found(at: int, index: int, part: Part, modality: Modality) -> FoundPart:
    path = f"messages[{at}].content[{index}]"
    if isinstance(part, AudioPart):
        path += ".input_audio.data"
        data = _base64(part.data, path)
    else:
        assert isinstance(part, ImagePart)
        path += ".image_url.url"
        data = _base64(part.url[_data_url_head(part.url, path) :], path)
    return FoundPart(at, index, path, modality, data, hashlib.sha256(data).hexdigest())


def _data_url_head(url: str, path: str) -> int:
    match = _DATA_URL.match(url)
    if match is not None and match["type"].lower().startswith("image/"):
        return match.end()
    if not url.lower().startswith("data:"):
        raise UnsupportedFeature(f"`{path}`: nothing is fetched from the network. Send a data: URL.", param=path)
    raise InvalidRequest(f"`{path}`: no data: URL of a picture. Send `data:image/png;base64,…`.", param=path)


def _base64(text: str, path: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest(f"`{path}` is no base64. Send the file's bytes in base64.", param=path) from None
