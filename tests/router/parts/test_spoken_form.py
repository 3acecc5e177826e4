"""The spoken form of transcripts, as commands that models learn from are written."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from causeway_server.router.parts.reading import spoken_form


@pytest.mark.parametrize(
    ("written", "spoken"),
    [
        ("Wake me up at six thirty a.m.!", "wake me up at six thirty am"),
        ("Set an alarm for seven A. M. tomorrow.", "set an alarm for seven am tomorrow"),
        ("What\N{RIGHT SINGLE QUOTATION MARK}s the weather in the U.S.?", "what's the weather in the us"),
        ("Dim the lights to twenty-five %, please", "dim the lights to twenty five percent please"),
        ("Play 'Rock & Roll' by J.K. Band.", "play rock and roll by jk band"),
        ("at 6:30, 3.5 degrees.", "at 6:30 3.5 degrees"),
        ("Öffne das Fenster – sofort…", "öffne das fenster sofort"),
        ("नमस्ते दुनिया।", "नमस्ते दुनिया"),
        ("the players' guitars", "the players guitars"),
        ("?!", "?!"),
        ("", ""),
    ],
)
def test_a_transcript_becomes_what_was_said(written: str, spoken: str) -> None:
    assert spoken_form(written) == spoken


@pytest.mark.parametrize(
    ("written", "spoken"),
    [
        ("Wake me at 6:30, or at 7am", "wake me at six thirty or at seven am"),
        ("12.30pm, 12:05 and 8:00", "twelve thirty pm twelve oh five and eight"),
        ("April 20, the 21st, the 5th and the 12th", "april twenty the twenty first the fifth and the twelfth"),
        ("530, 100, 1300 and 2005", "five hundred and thirty one hundred thirteen hundred and two thousand and five"),
        (
            "in 1999, in 1905, 90%, 3.5 degrees",
            "in nineteen ninety nine in nineteen oh five ninety percent three point five degrees",
        ),
        (
            "code 0420, PIN 0007, 0, at 06:30, at 07 am and the 05th",
            "code zero four two zero pin zero zero zero seven zero at six thirty at seven am and the fifth",
        ),
        ("mp3, 5551234, 1,000 and 192.168.1.1", "mp3 5551234 1,000 and 192.168.1.1"),
    ],
)
def test_english_numbers_are_said_in_words(written: str, spoken: str) -> None:
    assert spoken_form(written, "en") == spoken
    assert spoken_form(written, "de") == spoken_form(written)


@settings(max_examples=30)
@given(st.text())
def test_the_spoken_form_of_a_spoken_form_is_the_same(text: str) -> None:
    for language in ("", "en"):
        once = spoken_form(text, language)
        assert spoken_form(once, language) == once
