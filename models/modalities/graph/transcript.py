"""What was found in a sound, in the form of `/v1/audio/transcriptions`."""

from __future__ import annotations

import math

from router.errors import UnsupportedFeature
from router.openai.audio import GRANULARITIES, Transcript, TranscriptSegment, TranscriptWord

from ..process.messages import Found


def transcript_of(found: Found, seconds: float, *, words: bool = False) -> Transcript:
    """Return the transcript of a sound of this length. Whisper's time stamps may lie after its end; these do not.

    Raises:
        UnsupportedFeature: `words` are asked for, and the model that understood the sound gives no times of words.
    """
    timed = tuple(
        TranscriptWord(word.text, min(word.start_s, seconds), min(word.end_s, seconds))
        for segment in found.segments
        for word in segment.words
    )
    if words and found.fact.text and not timed:
        message = f"`{GRANULARITIES}`: the model of this tier or device gives no times of words. Send `segment`."
        raise UnsupportedFeature(message, param=GRANULARITIES)
    segments = tuple(
        TranscriptSegment(
            one.text,
            min(one.start_s, seconds),
            min(one.end_s, seconds),
            math.log(max(one.confidence, 1e-9)),
            one.no_speech,
        )
        for one in found.segments
    )
    return Transcript(found.fact.text, found.fact.language, seconds, segments, timed)
