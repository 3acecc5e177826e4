"""What two questions must share before their similarity counts."""

from __future__ import annotations

import pytest

from causeway_server.models.semantic.protected import opposed, poles, quoted, signature, words

HARMLESS = frozenset("what is the in on turn light show me tell a my to do i have how set alarm for at wake".split())


def parts(text: str) -> tuple[object, ...]:
    return signature(text, words(text), HARMLESS)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("What's the weather?", "what is the weather"),
        ("wake me at 6:30 p.m.", "wake me at 6:30pm"),
        ("wake me at six AM", "wake me at 6am"),
        ("I don't like john’s cars", "i do not like john car"),
        ("version 3.10, please", "version 3.10"),
        ("could you please turn the lights on, thanks", "turn the light on"),
        ("how do you say please", "how do you say please"),
        ("hey, what is 5 - 3", "what is 5 - 3"),
    ],
)
def test_words_are_comparable(text: str, found: str) -> None:
    """Lower case, contractions spelled out, digits for number words, no plural, no politeness around the question."""
    assert " ".join(words(text)) == found


def test_quotes_are_kept_as_written() -> None:
    assert quoted("say \"Hello\" and 'bye now', it's `x`") == ("Hello", "bye now", "x")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("set alarm for 6 am", "set alarm for 6 pm"),
        ("what is the light in kyoto", "what is the light in tokyo"),
        ("do i have a light", "do i not have a light"),
        ("when is the alarm", "where is the alarm"),
        ("how many light", "how old is the light"),
        ("set alarm from monday to friday", "set alarm from friday to monday"),
        ("what is 5 - 3", "what is 3 - 5"),
        ("what is the light", "что the light"),
        ('show "a"', "show a"),
        ("what is the Light", "what is the light"),
    ],
)
def test_protected_words_separate(one: str, other: str) -> None:
    assert parts(one) != parts(other)


def test_harmless_words_may_differ() -> None:
    assert parts("what is the alarm") == parts("tell me my alarm")


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("turn it up", "turn it down", True),
        ("turn up the volume", "increase the volume", False),
        ("turn up the volume", "lower the volume", True),
        ("my name", "your name", True),
        ("play music", "play some music", False),
        ("turn the light on and off", "turn the light on", False),
    ],
)
def test_ends_of_a_scale_are_opposed(one: str, other: str, expected: bool) -> None:
    """One text at the one end and the other at the other; a text at both ends opposes none."""
    assert opposed(poles(words(one)), poles(words(other))) is expected
    assert opposed(poles(words(other)), poles(words(one))) is expected
