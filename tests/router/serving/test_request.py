"""The table of request headers: lists are joined, tags have no case, and a header of ours has one value."""

from __future__ import annotations

import pytest

from router.errors import InvalidRequest
from router.serving.request import combined, members, one_value, read_deadline_ms, read_tags
from router.types import RoutingHints


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
