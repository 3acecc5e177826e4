"""Bytes that are no request, and content types that are not JSON."""

from __future__ import annotations

import gzip
import json

import pytest

from .shapes import chat_answer, error
from .surface import MAX_BODY_BYTES, Surface

pytestmark = [pytest.mark.triton, pytest.mark.engine, pytest.mark.slow]

PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
NOT_JSON = {
    "empty": b"",
    "blank": b" \r\n\t ",
    "open": b'{"model": "a"',
    "open-string": b'{"model": "a',
    "comma": b'{"model": "a",}',
    "quotes": b"{'model': 'a'}",
    "comment": b'{"model": "a" /* b */}',
    "two": b'{"model": "a"} {"model": "b"}',
    "nan": b'{"model": "a", "temperature": NaN}',
    "infinity": b'{"model": "a", "temperature": Infinity}',
    "leading-zero": b'{"model": "a", "n": 01}',
    "python": b'{"model": None}',
    "not-utf8": b'{"model": "\xff"}',
    "utf16": '{"model": "a"}'.encode("utf-16"),
    "surrogate": b'{"model": "\\ud800"}',
    "control": b'{"model": "a\nb"}',
    "deep": b"[" * 50_000,
    "deep-field": b'{"model": "a", "metadata": ' + b'{"a":' * 20_000 + b"1" + b"}" * 20_000 + b"}",
    "twice": b'{"model": "a", "model": "b"}',
    "twice-below": b'{"model": "a", "metadata": {"b": 1, "b": 2}}',
    "form": b"model=a&messages=b",
}
NOT_OBJECTS = [b"[]", b'"text"', b"null", b"5", b"true", b'[{"model": "a"}]']


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("body", NOT_JSON.values(), ids=list(NOT_JSON))
def test_a_body_that_is_not_json_is_400(surface: Surface, path: str, body: bytes) -> None:
    found = error(surface.send("POST", path, body), 400, code="invalid_json")
    assert len(found["message"]) < 500


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("body", NOT_OBJECTS)
def test_a_body_that_is_no_object_is_400(surface: Surface, path: str, body: bytes) -> None:
    error(surface.send("POST", path, body), 400)


def test_a_byte_order_mark_is_refused_or_ignored(surface: Surface) -> None:
    reply = surface.send("POST", "/v1/chat/completions", b"\xef\xbb\xbf" + json.dumps(surface.chat_body()).encode())
    if reply.status != 200:
        error(reply, 400, code="invalid_json")


def test_escapes_and_spaces_change_nothing(surface: Surface) -> None:
    body = json.dumps(surface.chat_body("grüß dich"), ensure_ascii=True, indent=4).encode()
    assert b"\\u00fc" in body
    chat_answer(surface.send("POST", "/v1/chat/completions", b"\r\n " + body + b"\n"))


# --- content types ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "media_type",
    [
        "text/plain",
        "text/plain; charset=utf-8",
        "text/json",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "application/octet-stream",
        "application/jsonl",
        "application/json5",
        "json",
        ";",
        "",
    ],
)
def test_another_content_type_is_415(surface: Surface, path: str, media_type: str) -> None:
    body = json.dumps(surface.chat_body() | {"prompt": "a", "input": "a"}).encode()
    error(surface.send("POST", path, body, {"content-type": media_type}), 415, code="unsupported_media_type")


@pytest.mark.parametrize(
    "media_type", ["application/json; charset=utf-8", "Application/JSON", "application/json;charset=UTF-8"]
)
def test_forms_of_jsons_content_type(surface: Surface, media_type: str) -> None:
    body = json.dumps(surface.chat_body(max_tokens=2)).encode()
    chat_answer(surface.send("POST", "/v1/chat/completions", body, {"content-type": media_type}))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br"])
def test_a_compressed_body_is_415(surface: Surface, path: str, encoding: str) -> None:
    body = gzip.compress(json.dumps(surface.chat_body()).encode())
    error(surface.send("POST", path, body, {"content-encoding": encoding}), 415, code="unsupported_media_type")


def test_an_identity_encoding_is_none(surface: Surface) -> None:
    body = json.dumps(surface.chat_body(max_tokens=2)).encode()
    chat_answer(surface.send("POST", "/v1/chat/completions", body, {"content-encoding": "identity"}))


# --- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("chunked", [False, True], ids=["declared", "chunked"])
def test_a_body_that_is_too_large_is_413(surface: Surface, path: str, chunked: bool) -> None:
    body = b'{"model": "' + b"x" * MAX_BODY_BYTES + b'"}'
    pieces = iter([body[at : at + 10_000] for at in range(0, len(body), 10_000)]) if chunked else body
    error(surface.send("POST", path, pieces), 413, code="body_too_large")


def test_a_body_in_chunks_is_answered(surface: Surface) -> None:
    body = json.dumps(surface.chat_body(max_tokens=2)).encode()
    chat_answer(surface.send("POST", "/v1/chat/completions", iter([body[:5], body[5:20], body[20:]])))
