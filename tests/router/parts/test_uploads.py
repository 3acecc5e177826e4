"""Uploaded files in bodies: which parts name one, what stands in its place, and the fields of an upload."""

from __future__ import annotations

import base64
import json

import pytest

from causeway_server.router.errors import BodyTooLarge, InvalidRequest, UnsupportedFeature
from causeway_server.router.parts.uploads import (
    FILE_MARK,
    PART_PURPOSES,
    Upload,
    UploadTerms,
    clean_filename,
    largest_file,
    media_type_of,
    named_files,
    parse_upload_terms,
)
from causeway_server.router.realtime.audio import AudioBuffer
from causeway_server.router.realtime.conversation import read_item

PNG = b"\x89PNG\r\n\x1a\n" + bytes(8)
FILES = {"file-1": Upload("file-1", "a.png", len(PNG)), "file-2": Upload("file-2", "b.txt", 5)}
CONTENTS = {"file-1": PNG, "file-2": b"hello"}


def chat(*parts: dict[str, object]) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": list(parts)}]}).encode()


@pytest.mark.parametrize(
    ("part", "path", "written"),
    [
        (
            {"type": "image_url", "image_url": {"url": "file-1", "detail": "low"}},
            "messages[0].content[0].image_url.url",
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,1", "detail": "low"}},
        ),
        (
            {"type": "input_audio", "input_audio": {"data": "file-2", "format": "wav"}},
            "messages[0].content[0].input_audio.data",
            {"type": "input_audio", "input_audio": {"data": "2", "format": "wav"}},
        ),
        (
            {"type": "file", "file": {"file_id": "file-2"}},
            "messages[0].content[0].file.file_id",
            {"type": "file", "file": {"file_data": "data:text/plain;base64,2", "filename": "b.txt"}},
        ),
        (
            {"type": "file", "file": {"file_id": "file-1", "filename": "mine"}},
            "messages[0].content[0].file.file_id",
            {"type": "file", "file": {"filename": "mine", "file_data": "data:image/png;base64,1"}},
        ),
        (
            {"type": "image", "source": {"type": "file", "file_id": "file-1"}},
            "messages[0].content[0].source.file_id",
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "1"}},
        ),
        (
            {"type": "document", "source": {"type": "file", "file_id": "file-2"}, "citations": None},
            "messages[0].content[0].source.file_id",
            {
                "type": "document",
                "source": {"type": "base64", "media_type": "text/plain", "data": "2"},
                "citations": None,
                "title": "b.txt",
            },
        ),
    ],
)
def test_the_bytes_stand_where_the_id_stood(part: dict[str, object], path: str, written: dict[str, object]) -> None:
    named = named_files(chat(part))
    assert named is not None
    assert [reference.path for reference in named.references] == [path]
    names = list(named.first)
    inlined = json.loads(named.inline(FILES, {name: CONTENTS[name] for name in names}))
    text = json.dumps(written)
    for name in FILES:
        encoded = base64.b64encode(CONTENTS[name]).decode()
        text = text.replace(f'base64,{name[-1]}"', f'base64,{encoded}"').replace(f': "{name[-1]}"', f': "{encoded}"')
    assert inlined["messages"][0]["content"] == [json.loads(text)]


@pytest.mark.parametrize(
    "body",
    [
        chat({"type": "text", "text": '"file-1"'}),
        chat({"type": "image_url", "image_url": {"url": "https://example.org/file-1"}}),
        chat({"type": "file", "file": {"filename": "file-1", "file_data": "YQ=="}}),
        chat({"type": "file", "file": "file-1"}, {"type": "image_url", "image_url": "file-1"}),
        b'{"messages": "file-1", "input": "file-1"}',
        b'{"messages": [{"content": ["file-1"]}, "file-1", null], "prompt": "file-1"}',
    ],
)
def test_bodies_that_name_no_file_are_left_as_they_are(body: bytes) -> None:
    assert named_files(body) is None


def test_most_bodies_are_not_looked_into() -> None:
    assert FILE_MARK not in b'{"messages": [{"role": "user", "content": "what is a file-1?"}]}'


def test_files_are_too_large_together_where_their_bytes_would_be() -> None:
    part: dict[str, object] = {"type": "file", "file": {"file_id": "file-2"}}
    named = named_files(chat(part, part, part))
    assert named is not None
    assert named.check_size(FILES, 100, 124) == 124
    with pytest.raises(BodyTooLarge, match=r"messages\[0\]\.content\[2\]\.file\.file_id"):
        named.check_size(FILES, 100, 123)
    assert 4 * -(-largest_file(8 << 20) // 3) < 8 << 20


@pytest.mark.parametrize(
    ("head", "name", "kind"),
    [
        (PNG, "note.txt", "image/png"),
        (b"RIFF\0\0\0\0WEBPVP8 ", "", "image/webp"),
        (b"RIFF\0\0\0\0WAVEfmt ", "x", "audio/wav"),
        (b"%PDF-1.7", "x", "application/pdf"),
        (b"<svg", "a.SVG", "image/svg+xml"),
        (b"hello", "a.md", "text/markdown"),
        (b"hello", "txt", "text/plain"),
        (b"hello", "a.b", "application/octet-stream"),
    ],
)
def test_the_first_bytes_say_what_a_file_is(head: bytes, name: str, kind: str) -> None:
    assert media_type_of(head, name) == kind


def test_terms_of_an_upload() -> None:
    anchor = {"expires_after[anchor]": "created_at"}
    assert parse_upload_terms({"purpose": "vision"}, PART_PURPOSES, 60.0) == UploadTerms("vision")
    limited = {"purpose": "user_data", **anchor, "expires_after[seconds]": "60"}
    assert parse_upload_terms(limited, PART_PURPOSES, 60.0) == UploadTerms("user_data", 60)
    for wrong in ({}, {"purpose": "evals"}, {"purpose": "vision", "expires_after[seconds]": "5"}):
        with pytest.raises(InvalidRequest, match=r"created_at|purpose"):
            parse_upload_terms(wrong, PART_PURPOSES, 60.0)
    for seconds in ("", "0", "61", "1.5", "-1", "١", "9" * 5000, "0" * 11 + "9" * 5000):
        with pytest.raises(InvalidRequest, match="from 1 to 60"):
            parse_upload_terms(limited | {"expires_after[seconds]": seconds}, PART_PURPOSES, 60.0)


@pytest.mark.parametrize(
    ("sent", "kept"),
    [("a\tb\x7f\udcff.txt", "a b .txt"), ("a/..", "file"), ("", "file"), ("C:\\x\\y.txt", "y.txt"), (" a ", "a")],
)
def test_a_name_is_one_step_on_one_line(sent: str, kept: str) -> None:
    assert clean_filename(sent) == kept


@pytest.mark.parametrize("kind", ["input_image", "input_file"])
def test_live_sessions_are_told_to_send_the_bytes(kind: str) -> None:
    item: dict[str, object] = {"type": "message", "role": "user", "content": [{"type": kind, "file_id": "file-1"}]}
    with pytest.raises(UnsupportedFeature, match=r"item\.content\[0\]\.file_id.*live sessions"):
        read_item(item, "item-1", AudioBuffer(1.0, "none"), "item")
