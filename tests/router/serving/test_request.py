"""The head of a request: plain paths, lists that are joined, tags without case, and one value for a header of ours."""

from __future__ import annotations

import pytest

from causeway_server.router.errors import InvalidRequest
from causeway_server.router.serving.request import (
    allowed_methods,
    combined,
    members,
    one_value,
    plain_path,
    read_choice,
    read_deadline_ms,
    read_request_id,
    read_tags,
    read_traceparent,
    served_method,
)
from causeway_server.router.types import RoutingHints


def test_a_list_on_several_lines_is_one_list_whatever_the_case_of_its_name() -> None:
    lines = [
        ("x-causeway-tags", "a"),
        ("X-Causeway-Tags", "private"),
        ("cache-control", "x"),
        ("Cache-Control", "no-store"),
    ]
    assert combined(lines) == {"x-causeway-tags": "a,private", "cache-control": "x,no-store"}


@pytest.mark.parametrize("name", ["x-causeway-prefer", "x-causeway-priority", "x-causeway-unknown", "causewaypriority"])
def test_a_header_of_ours_has_one_value(name: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        combined([(name, "a"), (name.upper(), "b")])
    assert refused.value.param == name
    assert combined([(name, "a"), (name.upper(), "a")]) == {name: "a"}


def test_foreign_headers_have_their_first_value() -> None:
    assert combined([("Accept-Language", "de"), ("accept-language", "en")]) == {"accept-language": "de"}
    assert one_value("x", ()) == ""


def test_empty_members_of_a_list_are_left_out() -> None:
    assert members(["a , ,b", "", "\tc"]) == ["a", "b", "c"]


def test_tags_are_folded_sorted_and_unique() -> None:
    assert read_tags("Private, b,PRIVATE") == ("b", "private")
    assert RoutingHints(tags=("Straße", "STRASSE", "A")).tags == ("a", "strasse")


@pytest.mark.parametrize("text", ["a\x01b", "a b", "a\x7fb", "a\x85b", "x" * 65, ",".join(map(str, range(33)))])
def test_a_malformed_tag_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_tags(text)
    assert refused.value.param == "x-causeway-tags"


@pytest.mark.parametrize("text", ["0", "000", "", "-1", "1.5", "soon", "1" * 10, "١"])
def test_a_deadline_is_a_positive_number_of_milliseconds(text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_deadline_ms(text)
    assert refused.value.param == "x-causeway-deadline-ms"
    assert (read_deadline_ms(None), read_deadline_ms("250")) == (None, 250)


def test_a_choice_is_one_of_its_words() -> None:
    assert read_choice({}, "x-causeway-priority", ("a", "b")) is None
    assert read_choice({"x-causeway-priority": "b"}, "x-causeway-priority", ("a", "b")) == "b"
    for value in ("", "c", "B"):
        with pytest.raises(InvalidRequest, match="must be one of a, b") as refused:
            read_choice({"x-causeway-priority": value}, "x-causeway-priority", ("a", "b"))
        assert refused.value.param == "x-causeway-priority"


def test_a_malformed_trace_context_is_ignored_and_a_malformed_id_replaced() -> None:
    context = f"00-{'a' * 32}-{'b' * 16}-01"
    assert read_traceparent({"traceparent": context}) == context
    assert [read_traceparent(headers) for headers in ({"traceparent": "x"}, {})] == ["", ""]
    assert read_request_id({"x-request-id": "my.id-1"}) == "my.id-1"
    made = [read_request_id(headers) for headers in ({}, {"x-request-id": "a b"}, {"x-request-id": "x" * 65})]
    assert len({*made, "a b", "x" * 65}) == 5


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
