"""The places of personal values and keys: each class with its forms, and what only looks like one."""

from __future__ import annotations

import pytest

from causeway_server.router.guard.classes import Found
from causeway_server.router.guard.detectors import find

PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\n-----END RSA PRIVATE KEY-----"
ONE = [
    ("email", "anna.meyer+shop@mail.example.co.uk"),
    ("email", "jürgen@bücher.example"),
    ("email", "anna@example.xn--p1ai"),
    ("card", "4111 1111 1111 1111"),
    ("card", "3714-496353-98431"),
    ("card", "5555555555554444"),
    ("card", "٤١١١١١١١١١١١١١١١"),
    ("card", "4111\N{NARROW NO-BREAK SPACE}1111\N{NARROW NO-BREAK SPACE}1111\N{NARROW NO-BREAK SPACE}1111"),
    ("iban", "DE89 3704 0044 0532 0130 00"),
    ("iban", "GB82WEST12345698765432"),
    ("iban", "fr14 2004 1010 0505 0001 3m02 606"),
    ("ip", "192.168.17.4"),
    ("ip", "2001:db8:85a3::8a2e:370:7334"),
    ("mac", "00:1b:44:11:3a:b7"),
    ("mac", "00-1B-44-11-3A-B7"),
    ("mac", "aa-bb-cc-dd-ee-ff"),
    ("phone", "+49 (0)30 901820"),
    ("phone", "+1 415-555-2671"),
    ("phone", "0033 6 12 34 56 78"),
    ("secret", "AKIAIOSFODNN7EXAMPLE"),
    ("secret", "ghp_" + "a1B2" * 9),
    ("secret", "glpat-abcdefghij0123456789"),
    ("secret", "sk-proj-" + "x9" * 20),
    ("secret", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9P"),
    ("secret", PEM),
]
CLEAN = [
    "The order 4111 1111 1111 1112 has a wrong check digit.",
    "DE89 3704 0044 0532 0130 01 is not an account.",
    "git clone git@github.com:owner/repository.git",
    "background: url(logo@2x.png)",
    "@dataclass\nclass A:\n    x: int",
    "npm i @types/node@18.2.0 react@18.2.0",
    "std::vector<int> dead::beef a::b1",
    "at 12:30:07 on 2024-03-12, version 1.2.3.4, chrome/120.0.6.9",
    "127.0.0.1, 0.0.0.0 and 255.255.255.0; 1.3.6.1.4.1.311",
    "request 550e8400-e29b-41d4-a716-446655440000, sha 0123456789abcdef0123456789abcdef01234567",
    "1. 2. 3. and 12.03.2024 14:30, 1.234,56 EUR, +20 %, 00:00",
    "call me on 12.03.2024 or (13.03.2024), order 12345678",
    "Section 21.17.9. Then a line\n----- and a pause...",
    "task-sk-1 and desk-lamp-with-a-long-descriptive-name-here",
    "",
]


@pytest.mark.parametrize(("kind", "value"), ONE)
@pytest.mark.parametrize("around", ["{}", "It is {}.", "({})", "a={}\nb", "“{}”, so"])
def test_a_value_is_found_with_its_whole_place(kind: str, value: str, around: str) -> None:
    text = around.format(value)
    (found,) = find(text)
    assert (found.kind, text[found.start : found.end]) == (kind, value)


@pytest.mark.parametrize("text", CLEAN)
def test_what_only_looks_like_a_value_is_not_one(text: str) -> None:
    assert find(text) == []


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("My phone number is 0151 23456789.", "0151 23456789"),
        ("Tel.: 030/9018200", "030/9018200"),
        ("ruf mich unter 0151 23456789 an", "0151 23456789"),
        ("appelle-moi au 06 12 34 56 78", "06 12 34 56 78"),
        ("llámame al 612 345 678", "612 345 678"),
        ("cellulare 347 1234567", "347 1234567"),
        ("liga-me para o 912 345 678", "912 345 678"),
        ("text me at (415) 555-2671", "(415) 555-2671"),
    ],
)
def test_a_national_number_is_found_after_a_word(text: str, value: str) -> None:
    (found,) = find(text)
    assert (found.kind, text[found.start : found.end]) == ("phone", value)


def test_a_national_number_of_a_named_region_is_found_anywhere() -> None:
    text = "0151 23456789 belongs to Anna, 99999999999 to nobody"
    assert find(text) == []
    assert find(text, ["FR", "DE"]) == [Found(0, 13, "phone")]


def test_a_number_beside_others_is_found_alone() -> None:
    assert find("7 4111 1111 1111 1111 12") == [Found(2, 21, "card")]
    assert find("4111 1111 1111 1111 123") == [Found(0, 19, "card")]
    assert find("::ffff:10.1.2.3") == [Found(7, 15, "ip")]
    assert find("+49 151 23456789 2024 12") == [Found(0, 16, "phone")]


def test_the_stricter_class_of_two_stays() -> None:
    """The password of a URL is not the beginning of a mail address."""
    text = "postgres://app:s3cret@db.example.com/x and DE89370400440532013000"
    assert [(one.kind, text[one.start : one.end]) for one in find(text)] == [
        ("secret", "s3cret"),
        ("iban", "DE89370400440532013000"),
    ]


@pytest.mark.parametrize("unit", "a@|a.b@c.|1|1 |+1 1111111 |12-|a:|ab:cd:|DE12 |eyJ|eyJ-|0.|xoxb-|://a:|(".split("|"))
def test_time_is_linear_in_a_hostile_text(unit: str) -> None:
    """Each costly candidate asks whether there is time left; what asks for none is counted by the clock of a test that
    would not end.
    """
    text = unit * (200_000 // len(unit))
    asked = 0

    def expired() -> bool:
        nonlocal asked
        asked += 1
        return asked > 200

    try:
        assert len(find(text, expired=expired)) <= len(text)
    except TimeoutError:
        assert asked == 201
