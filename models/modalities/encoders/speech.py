"""The words in a sound: Whisper by faster-whisper (CTranslate2, int8), behind its voice activity detection (Silero).

Whisper invents words where nobody speaks: only what the detection takes for speech reaches it.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from faster_whisper import WhisperModel

from router.types import Fact

from ..process.child import Link
from ..process.messages import Found, Refusal, Segment, SegmentFound, Transcribe, WorkerJob, WorkerResult, WorkerSpec

_THREADS = 2


class _Whisper(WhisperModel):  # type: ignore[misc]  # the package has no types
    """Encodes a sound once. faster-whisper encodes it to detect its language, and again for its words."""

    _encoded: tuple[npt.NDArray[np.float32], object] | None = None

    def encode(self, features: npt.NDArray[np.float32]) -> object:
        """Return the encoder's output. `features`: [mel bins, frames of 10 ms]."""
        if self._encoded is None or not _is_same(self._encoded[0], features):
            self._encoded = features, super().encode(features)
        return self._encoded[1]

    def forget(self) -> None:
        self._encoded = None


def _is_same(left: npt.NDArray[np.float32], right: npt.NDArray[np.float32]) -> bool:
    """Whether at most a frame differs: the last one, which is left out when words are searched."""
    return left.shape == right.shape and int((left != right).any(axis=0).sum()) <= 1


class SpeechEncoder:
    """`spec.options`: `model` is the folder of a CTranslate2 model."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._model = _Whisper(
            spec.options["model"], device="cpu", compute_type="int8", cpu_threads=_THREADS, local_files_only=True
        )

    def run(self, job: WorkerJob, link: Link) -> WorkerResult:
        if not isinstance(job, Transcribe):
            raise Refusal("it is no sound")
        if job.language and job.language not in self._model.supported_languages:
            raise Refusal(f"the language `{job.language}` is not known here. Leave it out, to detect it")
        # Greedy: five beams take twice the time, and a command is short.
        spoken, info = self._model.transcribe(
            np.frombuffer(job.sound.samples, "<f4"),
            language=job.language or None,
            initial_prompt=job.prompt or None,
            temperature=job.temperature,
            beam_size=1,
            vad_filter=True,
            condition_on_previous_text=False,
        )
        segments: list[Segment] = []
        for segment in spoken:  # decoded as they are asked for
            if link.cancelled:
                break
            words = segment.text.strip()
            if words:
                confidence = math.exp(segment.avg_logprob)
                segments.append(Segment(words, confidence, segment.start, segment.end, segment.no_speech_prob))
                if job.tell:
                    link.send(SegmentFound(segments[-1]))
        self._model.forget()
        text = " ".join(segment.text for segment in segments)
        return Found(Fact(text, _confidence(segments), info.language if segments else ""), tuple(segments))


def _confidence(segments: list[Segment]) -> float:
    """The mean over the segments, by their length: exp of the mean log probability of the tokens."""
    weights = [max(segment.end_s - segment.start_s, 0.01) for segment in segments]
    if not weights:
        return 1.0
    confidences = [segment.confidence for segment in segments]
    return sum(weight * one for weight, one in zip(weights, confidences, strict=True)) / sum(weights)
