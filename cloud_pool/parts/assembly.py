"""Builds what needs a tier that understands sounds. Imports none of it otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..http.request_admission import RequestAdmission
from ..http.request_runner import RequestRunner
from ..http.server import Handler

if TYPE_CHECKING:
    from models.modalities.graph.speech_detection import SpeechDetection
    from models.modalities.process.messages import WorkerSpec

    from .request_parts import RequestParts


def build_transcription(
    admission: RequestAdmission, runner: RequestRunner, parts: RequestParts | None
) -> Handler | None:
    """Return the handler of `/v1/audio/transcriptions`; None where no tier understands sounds."""
    if parts is None or "audio" not in parts.kinds:
        return None
    from ..http.transcription_routes import TranscriptionRoutes

    return TranscriptionRoutes(admission, runner, parts).transcription


def build_speech_detection(parts: RequestParts | None, spec: WorkerSpec | None) -> SpeechDetection | None:
    """Return what detects speech in live sessions; None where they take no sound, or nothing that does is installed.

    Args:
        spec: the detector; None: what is installed here.
    """
    if parts is None or "audio" not in parts.kinds:
        return None
    from models.modalities.graph.speech_detection import SpeechDetection
    from models.modalities.installed import find_speech_detector

    spec = spec or find_speech_detector()
    return None if spec is None else SpeechDetection(spec)
