"""The forms of a transcript."""

from __future__ import annotations

import json
import re
from typing import Literal

import msgspec
import pytest

from causeway_server.router.errors import InvalidRequest
from causeway_server.router.openai.audio import (
    LANGUAGE_CODES,
    Transcript,
    TranscriptionRequest,
    TranscriptSegment,
    TranscriptWord,
    encode_transcript,
    parse_transcription,
)

LONG = Transcript(
    "Turn it on. Then off & <out>.",
    "en",
    3730.0,
    (
        TranscriptSegment("Turn it on.", 0.0, 1.2345, -0.1, 0.1),
        TranscriptSegment("Then off\n\n& <out>.", 3725.9996, 3730.0, -0.1, 0.1),
    ),
)
SRT = """1
00:00:00,000 --> 00:00:01,234
Turn it on.

2
01:02:06,000 --> 01:02:10,000
Then off & <out>.

"""
VTT = """WEBVTT

00:00:00.000 --> 00:00:01.234
Turn it on.

01:02:06.000 --> 01:02:10.000
Then off &amp; &lt;out&gt;.

"""


@pytest.mark.parametrize(("form", "text"), [("srt", SRT), ("vtt", VTT)])
def test_subtitles_have_a_cue_for_each_segment(form: Literal["srt", "vtt"], text: str) -> None:
    """Hours count on, milliseconds round into the next second, and no blank line or tag of the text ends a cue."""
    assert encode_transcript(LONG, TranscriptionRequest(b"", "auto", format=form)).decode() == text


@pytest.mark.parametrize(("form", "text"), [("srt", ""), ("vtt", "WEBVTT\n\n")])
def test_subtitles_of_silence_have_no_cue(form: Literal["srt", "vtt"], text: str) -> None:
    request = TranscriptionRequest(b"", "auto", format=form)
    assert encode_transcript(Transcript("", "", 3.0), request).decode() == text


def parsed(*fields: tuple[str, bytes]) -> TranscriptionRequest:
    return parse_transcription([("file", b"x"), ("model", b"auto"), *fields])


VERBOSE = ("response_format", b"verbose_json")
SEGMENT, WORD = (("timestamp_granularities[]", kind) for kind in (b"segment", b"word"))


@pytest.mark.parametrize(
    ("sent", "keys"),
    [
        ((), {"segments"}),
        ((SEGMENT,), {"segments"}),
        ((WORD,), {"words"}),
        ((WORD, SEGMENT, WORD), {"segments", "words"}),
    ],
)
def test_a_verbose_transcript_has_the_times_that_were_asked_for(
    sent: tuple[tuple[str, bytes], ...], keys: set[str]
) -> None:
    transcript = msgspec.structs.replace(LONG, words=(TranscriptWord("Turn", 0.12345, 0.5),))
    body = json.loads(encode_transcript(transcript, parsed(VERBOSE, *sent)))
    assert {*body} & {"segments", "words"} == keys
    assert "words" not in keys or body["words"] == [{"word": "Turn", "start": 0.123, "end": 0.5}]


@pytest.mark.parametrize("sent", [(WORD,), (WORD, ("response_format", b"srt")), (WORD, ("stream", b"true"))])
def test_times_of_words_need_a_form_that_has_them(sent: tuple[tuple[str, bytes], ...]) -> None:
    with pytest.raises(InvalidRequest, match="verbose_json") as refused:
        parsed(*sent)
    assert refused.value.param == "timestamp_granularities[]"


def test_another_granularity_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="`segment` or `word`"):
        parsed(VERBOSE, ("timestamp_granularities[]", b"letter"))


@pytest.mark.parametrize(
    ("name", "code"),
    [
        *(("", ""), ("en", "en"), ("EN", "en"), ("yue", "yue"), ("english", "en"), ("German", "de")),
        *(("castilian", "es"), ("Haitian Creole", "ht"), ("cantonese", "yue"), ("mandarin", "zh")),
    ],
)
def test_a_language_is_a_code_or_an_english_name(name: str, code: str) -> None:
    assert parsed(("language", name.encode())).language == code


@pytest.mark.parametrize("name", ["klingon", "en-US", "deutsch", "english german"])
def test_another_language_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="English name") as refused:
        parsed(("language", name.encode()))
    assert refused.value.param == "language"


def test_each_code_of_a_language_has_a_name() -> None:
    assert all(re.fullmatch("[a-z]{2,3}", code) for code in LANGUAGE_CODES.values())
    assert (len(LANGUAGE_CODES), len({*LANGUAGE_CODES.values()})) == (112, 100)
