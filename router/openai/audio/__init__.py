"""`/v1/audio/transcriptions` and `/v1/audio/speech`: bodies → values, and a transcript → bytes."""

from .speech import SpeechRequest, parse_speech
from .transcription import (
    GRANULARITIES,
    JSON_FORMATS,
    OPENAI_MODEL,
    Transcript,
    TranscriptionRequest,
    TranscriptSegment,
    TranscriptWord,
    encode_delta,
    encode_done,
    encode_transcript,
    parse_transcription,
)

__all__ = [
    "GRANULARITIES",
    "JSON_FORMATS",
    "OPENAI_MODEL",
    "SpeechRequest",
    "Transcript",
    "TranscriptSegment",
    "TranscriptWord",
    "TranscriptionRequest",
    "encode_delta",
    "encode_done",
    "encode_transcript",
    "parse_speech",
    "parse_transcription",
]
