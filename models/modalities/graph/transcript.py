"""What was found in a sound, in the form of `/v1/audio/transcriptions`."""

from __future__ import annotations

import math

from router.openai.audio import Transcript, TranscriptSegment

from ..process.messages import Found


def transcript_of(found: Found, seconds: float) -> Transcript:
    """Return the transcript of a sound of this length. Whisper's time stamps may lie after its end; these do not."""
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
    return Transcript(found.fact.text, found.fact.language, seconds, segments)
