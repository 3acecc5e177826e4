"""The words in a sound: Whisper by faster-whisper (CTranslate2, int8), behind its voice activity detection (Silero).

Whisper invents words where nobody speaks: only what the detection takes for speech reaches it.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from faster_whisper import WhisperModel
from faster_whisper.tokenizer import Tokenizer

from router.types import Fact

from ..process.child import Link
from ..process.messages import Found, Refusal, Segment, Transcribe, WorkerJob, WorkerResult, WorkerSpec

_THREADS = 2
_DIGITS = frozenset("0123456789%$£€")
_DEFAULT_SUPPRESSED = -1  # faster-whisper's name for the symbols that nobody speaks


class SpeechEncoder:
    """`spec.options`: `model` is the folder of a CTranslate2 model."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._model = WhisperModel(
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
            suppress_tokens=[_DEFAULT_SUPPRESSED, *self._digits] if job.spell_numbers else [_DEFAULT_SUPPRESSED],
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
        text = " ".join(segment.text for segment in segments)
        return Found(Fact(text, _confidence(segments), info.language if segments else ""), tuple(segments))

    @functools.cached_property
    def _digits(self) -> list[int]:
        """The tokens with a digit or a sign for a spoken word; without them Whisper writes the words."""
        tokenizer = Tokenizer(self._model.hf_tokenizer, self._model.model.is_multilingual, "transcribe", "en")
        return [token for token in range(tokenizer.eot) if _DIGITS.intersection(tokenizer.decode([token]))]


def _confidence(segments: list[Segment]) -> float:
    """The mean over the segments, by their length: exp of the mean log probability of the tokens."""
    weights = [max(segment.end_s - segment.start_s, 0.01) for segment in segments]
    if not weights:
        return 1.0
    confidences = [segment.confidence for segment in segments]
    return sum(weight * one for weight, one in zip(weights, confidences, strict=True)) / sum(weights)
