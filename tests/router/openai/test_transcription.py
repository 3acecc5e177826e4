"""The forms of a transcript."""

from __future__ import annotations

from typing import Literal

import pytest

from router.openai.audio import Transcript, TranscriptSegment, encode_transcript

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
    assert encode_transcript(LONG, form).decode() == text


@pytest.mark.parametrize(("form", "text"), [("srt", ""), ("vtt", "WEBVTT\n\n")])
def test_subtitles_of_silence_have_no_cue(form: Literal["srt", "vtt"], text: str) -> None:
    assert encode_transcript(Transcript("", "", 3.0), form).decode() == text
