"""The worker that decodes parts. Each decoder is imported with the first part of its kind."""

from __future__ import annotations

from ..process.child import Link
from ..process.messages import (
    DecodePicture,
    DecodeSound,
    DecodeText,
    MeasurePicture,
    Refusal,
    WorkerJob,
    WorkerResult,
    WorkerSpec,
)


class PartDecoder:
    """Decodes sound, pictures and text within `spec.limits`."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._limits = spec.limits

    def run(self, job: WorkerJob, link: Link) -> WorkerResult:
        if isinstance(job, DecodeSound):
            from .sound import decode_sound

            return decode_sound(job.data, self._limits.audio_s)
        if isinstance(job, DecodePicture):
            from .pictures import decode_picture

            return decode_picture(job.data, self._limits)
        if isinstance(job, DecodeText):
            from .texts import decode_text

            return decode_text(job.data, self._limits.text_bytes)
        if isinstance(job, MeasurePicture):
            from .pictures import measure_picture

            return measure_picture(job.data, self._limits)
        raise Refusal(f"a decoder cannot {type(job).__name__}")
