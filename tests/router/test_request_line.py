"""The path and the method of a request, as every listener reads them."""

from __future__ import annotations

import pytest

from router.request_line import allowed_methods, plain_path, served_method


@pytest.mark.parametrize(
    ("sent", "plain"),
    [
        ("/", "/"),
        ("//", "/"),
        ("/v1/models", "/v1/models"),
        ("/v1/models/", "/v1/models"),
        ("//v1///models//", "/v1/models"),
        ("/v1/models/a%2F%2Fb%2F", "/v1/models/a%2F%2Fb%2F"),
        ("*", "*"),
        ("", ""),
    ],
)
def test_a_path_has_no_empty_segments(sent: str, plain: str) -> None:
    assert plain_path(sent) == plain


@pytest.mark.parametrize(
    ("method", "headers", "served"),
    [
        ("GET", (), "GET"),
        ("HEAD", (), "GET"),
        ("HEAD", ("Upgrade",), "HEAD"),
        ("POST", (), "POST"),
        ("head", (), "head"),
    ],
)
def test_get_answers_head_unless_it_opens_a_websocket(method: str, headers: tuple[str, ...], served: str) -> None:
    assert served_method(method, headers) == served


def test_allow_names_head_beside_get() -> None:
    assert (allowed_methods("GET, POST"), allowed_methods("POST")) == ("GET, HEAD, POST", "POST")
