"""Paths, methods, keys, headers and connections."""

from __future__ import annotations

import json

import pytest

from .shapes import chat_answer, error
from .surface import Surface

pytestmark = [pytest.mark.triton, pytest.mark.engine, pytest.mark.slow]

POSTED = ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]


# --- paths and methods -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/v1",
        "/v1/",
        "/v1/nothing",
        "/v2/chat/completions",
        "/chat/completions",
        "/v1/chat",
        "/v1/chat/completions/some-id",
        "//v1/chat//",
        "/V1/chat/completions",
        "/v1/responses/some-id/nothing",
        "/v1/audio/translations",
        "/v1/engines/small/completions",
        "/v1/%00",
    ],
)
def test_an_unknown_path_is_404(surface: Surface, method: str, path: str) -> None:
    error(surface.send(method, path, b"{}" if method == "POST" else None), 404, code="not_found")


@pytest.mark.parametrize("path", POSTED)
@pytest.mark.parametrize("method", ["GET", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_another_method_is_405_and_names_the_right_one(surface: Surface, path: str, method: str) -> None:
    reply = surface.send(method, path, b"{}")
    found = error(reply, 405, code="method_not_allowed")
    assert reply.headers["allow"] == "POST"
    assert "POST" in found["message"]


@pytest.mark.parametrize("path", [*POSTED, "/v1/models"])
def test_no_browser_of_another_origin_may_read_answers(surface: Surface, path: str) -> None:
    origin = {"origin": "https://example.org", "access-control-request-method": "POST"}
    for reply in (surface.send("OPTIONS", path, headers=origin), surface.post(path, {}, origin)):
        assert not [name for name in reply.headers if name.startswith("access-control-")]


@pytest.mark.parametrize("path", ["/v1/chat/completions/", "//v1/chat/completions", "/v1//chat///completions//?a=b"])
def test_a_slash_too_many_reaches_the_same_handler(surface: Surface, path: str) -> None:
    chat_answer(surface.post(path, surface.chat_body(max_tokens=2)))


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/", "/v1/models/nothing", "/healthz", "/v1/nothing"])
def test_head_is_answered_as_get_without_the_body(surface: Surface, path: str) -> None:
    whole, head = surface.get(path), surface.send("HEAD", path)
    assert (head.status, head.headers["content-type"]) == (whole.status, whole.headers["content-type"])
    assert head.headers["content-length"] == whole.headers["content-length"] or path == "/healthz"
    assert head.body == b""


def test_head_where_no_get_is_is_405_without_a_body(surface: Surface) -> None:
    reply = surface.send("HEAD", "/v1/chat/completions")
    assert (reply.status, reply.headers["allow"], reply.body) == (405, "POST", b"")


def test_a_query_is_ignored(surface: Surface) -> None:
    reply = surface.post("/v1/chat/completions?api-version=2024-10-21", surface.chat_body(max_tokens=2))
    chat_answer(reply)
    assert surface.get("/v1/models?limit=5").status == 200


# --- keys ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*POSTED, "/v1/models", "/v1/models/small"])
@pytest.mark.parametrize(
    "authorization",
    ["", "Bearer", "Bearer ", "Bearer wrong", "Bearer wrong key", "Basic dXNlcjpwYXNz", "wrong", "Bearer \xe9"],
    ids=["absent", "empty", "blank", "wrong", "two-words", "basic", "bare", "not-ascii"],
)
def test_a_missing_or_unknown_key_is_401(surface: Surface, path: str, authorization: str) -> None:
    method, body = ("GET", None) if "models" in path else ("POST", b"{}")
    reply = surface.send(method, path, body, {"authorization": authorization})
    found = error(reply, 401, code="invalid_api_key", param=None)
    assert reply.headers["www-authenticate"] == "Bearer"
    assert "wrong" not in found["message"]


def test_a_key_is_asked_for_before_the_body_is_judged(surface: Surface) -> None:
    error(surface.send("POST", "/v1/chat/completions", b"{", {"authorization": "Bearer wrong"}), 401)


@pytest.mark.parametrize("scheme", ["bearer", "BEARER", "Bearer"])
def test_the_schemes_case_does_not_matter(surface: Surface, scheme: str) -> None:
    assert surface.get("/v1/models", authorization=f"{scheme} {surface.api_key}").status == 200


# --- headers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", POSTED)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_every_answer_has_a_request_id(surface: Surface, path: str, stream: bool) -> None:
    bodies = {
        "/v1/chat/completions": surface.chat_body(max_tokens=2, stream=stream),
        "/v1/completions": surface.completion_body(max_tokens=2, stream=stream),
        "/v1/embeddings": {"model": surface.model, "input": "a"},
    }
    reply = surface.post(path, bodies[path])
    assert reply.status == 200
    assert 8 <= len(reply.headers["x-request-id"]) <= 64


@pytest.mark.parametrize("body", [b"{", b"{}"], ids=["broken", "incomplete"])
@pytest.mark.parametrize("key", [None, "wrong"], ids=["known", "unknown key"])
def test_every_refusal_has_a_request_id(surface: Surface, body: bytes, key: str | None) -> None:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    first, second = (surface.send("POST", "/v1/chat/completions", body, headers) for _ in range(2))
    assert first.status == (400 if key is None else 401)
    assert 8 <= len(first.headers["x-request-id"]) <= 64
    assert first.headers["x-request-id"] != second.headers["x-request-id"]


@pytest.mark.parametrize("sent", ["", "my-id-1", "x" * 5000, "a b", "\xe9"])
def test_any_request_id_of_the_client_is_accepted(surface: Surface, sent: str) -> None:
    reply = surface.post("/v1/chat/completions", surface.chat_body(max_tokens=2), {"x-request-id": sent})
    chat_answer(reply)
    assert len(reply.headers["x-request-id"]) <= 64


def test_headers_of_openais_client_do_no_harm(surface: Surface) -> None:
    sent = {"openai-organization": "org-1", "openai-project": "p", "openai-beta": "assistants=v2"}
    sent |= {"x-stainless-lang": "python", "accept": "text/event-stream", "accept-encoding": "gzip, br"}
    sent |= {"traceparent": "nonsense", "idempotency-key": "k1", "user-agent": ""}
    reply = surface.post("/v1/chat/completions", surface.chat_body(max_tokens=2), sent)
    chat_answer(reply)
    assert "content-encoding" not in reply.headers


@pytest.mark.parametrize(
    "header", [{"x-causeway-deadline-ms": "soon"}, {"x-causeway-tags": "x" * 80}, {"x-causeway-tag": "private"}]
)
def test_a_malformed_header_of_ours_is_400(surface: Surface, header: dict[str, str]) -> None:
    found = error(surface.post("/v1/chat/completions", surface.chat_body(), header), 400)
    assert found["param"] == next(iter(header))


def test_a_deadline_that_cannot_be_kept_is_504(surface: Surface) -> None:
    body = surface.chat_body("tell me everything", max_tokens=500)
    found = error(surface.post("/v1/chat/completions", body, {"x-causeway-deadline-ms": "1"}), 504)
    assert found["code"] in ("deadline_exceeded", "engine_timeout")


# --- connections -----------------------------------------------------------------------------------------------------


def _head(surface: Surface, body: bytes, *lines: str, version: str = "1.1") -> bytes:
    head = [f"POST /v1/chat/completions HTTP/{version}", f"Host: {surface.host}", "Content-Type: application/json"]
    head += [f"Authorization: Bearer {surface.api_key}", f"Content-Length: {len(body)}", *lines]
    return "\r\n".join([*head, "", ""]).encode()


def _body(surface: Surface, **fields: object) -> bytes:
    return json.dumps(surface.chat_body(max_tokens=2, **fields)).encode()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_http_1_0_is_answered_and_closed(surface: Surface, stream: bool) -> None:
    body = _body(surface, stream=stream)
    head, _, answer = surface.raw(_head(surface, body, version="1.0") + body).partition(b"\r\n\r\n")
    assert head.split()[1] == b"200"
    assert b"transfer-encoding" not in head.lower()
    assert answer.endswith(b"data: [DONE]\n\n" if stream else b"}")


def test_a_client_that_waits_for_100_continue_gets_it(surface: Surface) -> None:
    body = _body(surface)
    received = surface.raw(_head(surface, body, "Expect: 100-continue", "Connection: close") + body)
    assert received.split(b"\r\n\r\n")[-1].endswith(b"}")


@pytest.mark.parametrize("path", ["/v1/models", "/v1/jobs", "/v1/files", "/v1/jobs/job_1"])
def test_two_credentials_that_differ_are_400_and_twice_the_same_is_one(surface: Surface, path: str) -> None:
    for second, refused in (("another", True), (surface.api_key, False)):
        head = [f"GET {path} HTTP/1.1", f"Host: {surface.host}", "Connection: close"]
        head += [f"Authorization: Bearer {key}" for key in (surface.api_key, second)]
        received = surface.raw("\r\n".join([*head, "", ""]).encode())
        assert (received.split()[1] == b"400") is refused, received


def test_a_connection_stays_open_after_an_answer_a_stream_and_an_error(surface: Surface) -> None:
    whole, stream, bad = _body(surface), _body(surface, stream=True), b"{"
    request = b"".join(_head(surface, body) + body for body in (whole, stream, bad, stream))
    received = surface.raw(request + _head(surface, whole, "Connection: close") + whole)
    assert received.count(b"HTTP/1.1 200") == 4
    assert received.count(b"HTTP/1.1 400") == 1
    assert received.count(b"data: [DONE]") == 2


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"POST /v1/models HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"POST /v1/models HTTP/1.1\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        b"POST /v1/models HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n{}",
    ],
    ids=["nonsense", "version", "http2", "length", "two-lengths", "both"],
)
def test_bytes_that_are_not_http_get_the_error_object(surface: Surface, request_bytes: bytes) -> None:
    head, _, body = surface.raw(request_bytes).partition(b"\r\n\r\n")
    assert head.split()[1] == b"400"
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


def test_a_header_that_is_too_long_gets_the_error_object(surface: Surface) -> None:
    long = "x" * 20_000
    head, _, body = surface.raw(_head(surface, b"{}", f"x-long: {long}") + b"{}").partition(b"\r\n\r\n")
    assert head.split()[1] in (b"400", b"431")
    assert json.loads(body)["error"]["message"]
