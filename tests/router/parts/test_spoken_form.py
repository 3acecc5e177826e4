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


@settings(max_examples=30)
@given(st.text())
def test_the_spoken_form_of_a_spoken_form_is_the_same(text: str) -> None:
    once = spoken_form(text)
    assert spoken_form(once) == once
