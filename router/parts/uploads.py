"""Uploaded files as parts of a request: a part may have the id of an uploaded file instead of its bytes.

    {"type": "file", "file": {"file_id": "file-1"}}                             chats: any file
    {"type": "image_url", "image_url": {"url": "file-1"}}                       chats: an image
    {"type": "input_audio", "input_audio": {"data": "file-1", "format": "wav"}} chats and responses: an audio clip
    {"type": "input_file", "file_id": "file-1"}                                 responses: any file
    {"type": "input_image", "file_id": "file-1"}                                responses: an image
    {"type": "document", "source": {"type": "file", "file_id": "file-1"}}       messages: any file
    {"type": "image", "source": {"type": "file", "file_id": "file-1"}}          messages: an image

`inline` replaces the ids by the bytes in base64 before anything else reads the body, so that bounds, decision, hashes
and cache key are the same as for a body with the bytes.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final, Literal, get_args

import msgspec

from ..errors import BodyTooLarge, InvalidRequest, MissingField, UnsupportedFeature
from ..numbers import whole_number
from ..openai.request_body import load, merge_hints
from ..openai.wire import WireRoutingHints
from ..types import RoutingHints

PREFIX: Final = "file-"
NOT_READ_HERE: Final = "this server does not read uploaded files. Send the bytes as a data: URL in base64."
NO_AUDIO_DATA: Final = "this server does not read uploaded files. Send the audio in base64."
FILE_MARK: Final = b'"file-'
"""The text that marks bodies which name uploaded files. Callers search for it first, because nearly no body has it."""
_ID: Final = re.compile(r"file-[\w.-]{1,75}", re.ASCII)
_HEAD_BYTES: Final = 64  # enough to recognise a file's type
_BESIDE_BYTES: Final = 64 * 1024  # the rest of a body with a file of the largest size
_DEFAULT: Final = "application/octet-stream"
_BY_HEAD: Final = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"BM", "image/bmp"),
    (b"II*\0", "image/tiff"),
    (b"MM\0*", "image/tiff"),
    (b"%PDF-", "application/pdf"),
    (b"OggS", "audio/ogg"),
    (b"fLaC", "audio/flac"),
    (b"ID3", "audio/mpeg"),
)
_BY_RIFF: Final = {b"WEBP": "image/webp", b"WAVE": "audio/wav"}
_BY_ENDING: Final = {
    "txt": "text/plain",
    "md": "text/markdown",
    "csv": "text/csv",
    "html": "text/html",
    "xml": "application/xml",
    "json": "application/json",
    "svg": "image/svg+xml",
    "pdf": "application/pdf",
    "mp3": "audio/mpeg",
}


class Upload(msgspec.Struct, frozen=True):
    """The metadata of an uploaded file."""

    id: str
    filename: str
    bytes: int


class Reference(msgspec.Struct, frozen=True):
    """A part that names an uploaded file. `path`: the path of its id in the body; `part`: the decoded part."""

    path: str
    id: str
    part: dict[str, Any]


class NamedFiles:
    """The files that a body names. `references`: one for each part, in order."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document
        self.references = tuple(_references(document))

    @property
    def first(self) -> Mapping[str, Reference]:
        """The first part that names each file, by the file's id."""
        found: dict[str, Reference] = {}
        for reference in self.references:
            found.setdefault(reference.id, reference)
        return found

    def check_size(self, files: Mapping[str, Upload], body_bytes: int, max_bytes: int) -> int:
        """Return the body's minimum size with files in base64. BodyTooLarge names the part that exceeds `max_bytes`."""
        size = body_bytes
        for reference in self.references:
            size += 4 * -(-files[reference.id].bytes // 3)
            if size > max_bytes:
                raise BodyTooLarge(
                    f"`{reference.path}`: with its uploaded files in base64 the request has more than "
                    f"{max_bytes} bytes, which is the maximum. Name fewer or smaller files.",
                    param=reference.path,
                )
        return size

    def restrict(self, hints: RoutingHints) -> None:
        """Add the tags and the restriction of the files to the hints of the body. Raises InvalidRequest. The parser of
        the body refuses a malformed `causeway` later.
        """
        if not (hints.tags or hints.prefer):
            return
        routing = self._document.get("causeway") or {}
        with suppress(msgspec.ValidationError):
            merged = merge_hints(hints, msgspec.convert(routing, WireRoutingHints))
            self._document["causeway"] = {**routing, "tags": merged.tags, "prefer": merged.prefer}

    def inline(self, files: Mapping[str, Upload], contents: Mapping[str, bytes]) -> bytes:
        """Return the body with its files in place of ids. Call it once. InvalidRequest: a file is not an image."""
        encoded = {name: base64.b64encode(data).decode() for name, data in contents.items()}
        for reference in self.references:
            head = contents[reference.id][:_HEAD_BYTES]
            _write(reference, files[reference.id], encoded[reference.id], head)
        return msgspec.json.encode(self._document)


def largest_file(max_body_bytes: int) -> int:
    """Return the size of the largest file that a body can carry in base64, together with a question of some length."""
    return max(1, (max_body_bytes - min(_BESIDE_BYTES, max_body_bytes // 4)) // 4 * 3)


def named_files(body: bytes) -> NamedFiles | None:
    """Return the files that a body names, if any. Raise InvalidRequest if it is not a JSON object, or repeats a key."""
    if FILE_MARK not in body:
        return None
    found = NamedFiles(load(body))
    return found if found.references else None


def media_type_of(head: bytes, filename: str) -> str:
    """Return the media type of a file, by its first bytes, else by its name's extension."""
    if head[:4] == b"RIFF" and (kind := _BY_RIFF.get(head[8:12])):
        return kind
    known = next((kind for start, kind in _BY_HEAD if head.startswith(start)), "")
    return known or _BY_ENDING.get(filename.rpartition(".")[2].lower(), _DEFAULT)


def _references(document: dict[str, Any]) -> Iterator[Reference]:
    for name, field in (("messages", "content"), ("input", "content"), ("input", "output")):
        for path, part in _parts(document, name, field):
            if (found := _reference(path, part)) is not None:
                yield found


def _parts(document: dict[str, Any], name: str, field: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the parts with their paths; malformed content is left to the parser of the body."""
    items = document.get(name)
    for at, item in enumerate(items if isinstance(items, list) else ()):
        content = item.get(field) if isinstance(item, dict) else None
        for index, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, dict):
                yield f"{name}[{at}].{field}[{index}]", part


def _reference(path: str, part: dict[str, Any]) -> Reference | None:
    match part:
        case {"type": "file", "file": {"file_id": str(name)}}:
            path += ".file.file_id"
        case {"type": "image_url", "image_url": {"url": str(name)}}:
            path += ".image_url.url"
        case {"type": "input_audio", "input_audio": {"data": str(name)}}:
            path += ".input_audio.data"
        case {"type": "input_file" | "input_image", "file_id": str(name)}:
            path += ".file_id"
        case {"type": "document" | "image", "source": {"type": "file", "file_id": str(name)}}:
            path += ".source.file_id"
        case _:
            return None
    if not name.startswith(PREFIX):
        return None
    return Reference(path, name, part)


def is_file_id(name: str) -> bool:
    """Return whether a text has the form of a file's id."""
    return _ID.fullmatch(name) is not None


def _write(reference: Reference, file: Upload, encoded: str, head: bytes) -> None:
    part, kind = reference.part, media_type_of(head, file.filename)
    match part["type"]:
        case "input_audio":
            part["input_audio"]["data"] = encoded
        case "image_url":
            part["image_url"]["url"] = f"data:{_image(reference, kind)};base64,{encoded}"
        case "input_image":
            _refuse_both(reference, part, "image_url")
            part["image_url"] = f"data:{_image(reference, kind)};base64,{encoded}"
            del part["file_id"]
        case "image" | "document":
            known = _image(reference, kind) if part["type"] == "image" else kind
            part["source"] = {"type": "base64", "media_type": known, "data": encoded}
            if part["type"] == "document":
                part["title"] = part.get("title") or file.filename
        case _:
            holder = part["file"] if part["type"] == "file" else part
            _refuse_both(reference, holder, "file_data")
            holder["file_data"] = f"data:{kind};base64,{encoded}"
            holder["filename"] = holder.get("filename") or file.filename
            del holder["file_id"]


def _refuse_both(reference: Reference, holder: dict[str, Any], other: str) -> None:
    if holder.get(other):
        raise InvalidRequest(f"`{reference.path}`: `{other}` is set, too. Send only one of them.", param=reference.path)


def _image(reference: Reference, kind: str) -> str:
    if kind.startswith("image/"):
        return kind
    raise InvalidRequest(
        f"`{reference.path}`: {reference.id} is {kind}, not an image of a known type. Name an image.",
        param=reference.path,
    )


PartPurpose = Literal["user_data", "vision", "assistants"]
PART_PURPOSES: Final[tuple[PartPurpose, ...]] = get_args(PartPurpose)
"""The purposes of files that requests name as parts. All three have the same meaning here."""
CONTENT_KEPT: Final = "the content of files that requests name cannot be downloaded, as at OpenAI. Keep your own copy."
_MAX_NAME = 255
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"


class UploadTerms(msgspec.Struct, frozen=True):
    """The terms of an upload. `ttl_s`: the time for which the file is kept; None: the maximum."""

    purpose: str
    ttl_s: int | None = None


def parse_upload_terms(fields: Mapping[str, str], purposes: Collection[str], max_ttl_s: float) -> UploadTerms:
    """Return the terms of an upload: the fields of OpenAI's `POST /v1/files` other than the file, which is kept for at
    most `max_ttl_s`. Raises InvalidRequest.
    """
    names = ", ".join(purposes)
    purpose = fields.get("purpose", "")
    if not purpose:
        raise MissingField(f"`purpose` is missing. Send one of {names}.", param="purpose")
    if purpose not in purposes:
        raise UnsupportedFeature(f"`purpose` must be one of {names}, not {purpose[:64]!r}.", param="purpose")
    return UploadTerms(purpose, _ttl_s(fields, max_ttl_s))


def _ttl_s(fields: Mapping[str, str], max_ttl_s: float) -> int | None:
    anchor, text = fields.get(_ANCHOR), fields.get(_SECONDS)
    if anchor is None and text is None:
        return None
    if anchor != "created_at":
        raise InvalidRequest(f"`{_ANCHOR}` must be `created_at`.", param=_ANCHOR)
    ttl_s = whole_number(text or "", int(max_ttl_s))
    if not ttl_s:
        raise InvalidRequest(
            f"`{_SECONDS}` must be a whole number from 1 to {int(max_ttl_s)}, the time for which this "
            "server keeps files.",
            param=_SECONDS,
        )
    return ttl_s


def clean_filename(name: str) -> str:
    """Return the last component of a file's name, on one line; "file" if it is empty. It is for display only."""
    last = name.replace("\\", "/").rpartition("/")[2]
    shown = " ".join("".join(character if character.isprintable() else " " for character in last).split())
    return shown[:_MAX_NAME] if shown.strip(".") else "file"
