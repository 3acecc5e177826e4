"""The words in a sound: Whisper by faster-whisper (CTranslate2, int8), behind its voice activity detection (Silero).

Whisper invents words where nobody speaks: only what the detection takes for speech reaches it.
"""

from __future__ import annotations

import math

import numpy as np
from faster_whisper import WhisperModel

from router.types import Fact

from ..process.child import Link
from ..process.messages import Found, Refusal, Segment, Sound, WorkerJob, WorkerResult, WorkerSpec

_THREADS = 2


class SpeechEncoder:
    """`spec.options`: `model` is the folder of a CTranslate2 model."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._model = WhisperModel(
            spec.options["model"], device="cpu", compute_type="int8", cpu_threads=_THREADS, local_files_only=True
        )

    def run(self, job: WorkerJob, link: Link) -> WorkerResult:
        if not isinstance(job, Sound):
            raise Refusal("it is no sound")
        samples = np.frombuffer(job.samples, "<f4")
        # Greedy: five beams take twice the time, and a command is short.
        spoken, info = self._model.transcribe(
            samples, beam_size=1, vad_filter=True, condition_on_previous_text=False, without_timestamps=False
        )
        segments: list[Segment] = []
        for segment in spoken:  # decoded as they are asked for
            if link.cancelled:
                break
            words = segment.text.strip()
            if words:
                segments.append(Segment(words, math.exp(segment.avg_logprob), segment.start, segment.end))
        text = " ".join(segment.text for segment in segments)
        return Found(Fact(text, _confidence(segments), info.language if segments else ""), tuple(segments))


def _confidence(segments: list[Segment]) -> float:
    """The mean over the segments, by their length: exp of the mean log probability of the tokens."""
    weights = [max(segment.end_s - segment.start_s, 0.01) for segment in segments]
    if not weights:
        return 1.0
    confidences = [segment.confidence for segment in segments]
    return sum(weight * one for weight, one in zip(weights, confidences, strict=True)) / sum(weights)
