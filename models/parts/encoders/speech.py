"""Transcription of audio clips: Whisper by faster-whisper (CTranslate2, int8), after voice activity detection (Silero).

Whisper invents words if there is no speech, so it gets only the sections that the detection takes for speech. It always
encodes windows of 30 s. For a command, which is a short clip in the language of the word model, the window is a third
of that, which takes a fifth of the time. The accuracy that this costs is regained by the word model's choice among ten.
"""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
from faster_whisper import WhisperModel

from causeway_server.router.types import Fact

from ..process.child import Link
from ..process.messages import (
    Found,
    Refusal,
    Segment,
    SegmentFound,
    Transcribe,
    Word,
    WorkerJob,
    WorkerResult,
    WorkerSpec,
)
from .words import WordModel

_THREADS = 2
_FRAMES = 3000  # of 10 ms, that Whisper encodes
_COMMAND_S = 9.0
_COMMAND_FRAMES = 1000
_COMMAND_TOKENS = 100  # in case it repeats itself
_TRANSCRIPTS = 10


class _Whisper(WhisperModel):  # type: ignore[misc]  # the package has no types
    """Whisper with one encoding per audio clip; faster-whisper alone makes two. `words`: None if not a command."""

    words: WordModel | None = None
    _encoded: tuple[npt.NDArray[np.float32], object] | None = None

    def encode(self, features: npt.NDArray[np.float32]) -> object:
        """Return the encoder's output. `features`: [mel bins, frames of 10 ms]."""
        features = np.ascontiguousarray(features[:, : _FRAMES if self.words is None else _COMMAND_FRAMES])
        if self._encoded is None or not _is_same(self._encoded[0], features):
            self._encoded = features, super().encode(features)
        return self._encoded[1]

    def generate_with_fallback(
        self, encoder_output: object, prompt: list[int], tokenizer: Any, options: Any
    ) -> tuple[Any, float, float, float]:
        """Return the tokens, their mean log probability, the temperature and the compression ratio."""
        if self.words is None:
            found: tuple[Any, float, float, float] = super().generate_with_fallback(
                encoder_output, prompt, tokenizer, options
            )
            return found
        result = self.model.generate(
            encoder_output,
            [prompt],
            beam_size=_TRANSCRIPTS,
            num_hypotheses=_TRANSCRIPTS,
            max_length=len(prompt) + _COMMAND_TOKENS,
            suppress_tokens=options.suppress_tokens,
            return_scores=True,
            return_no_speech_prob=True,
        )[0]
        log_probabilities = [
            score * len(tokens) for tokens, score in zip(result.sequences_ids, result.scores, strict=True)
        ]
        texts = [tokenizer.decode([one for one in tokens if one < tokenizer.eot]) for tokens in result.sequences_ids]
        best = self.words.best(list(zip(texts, log_probabilities, strict=True)))
        tokens = result.sequences_ids[best]
        chosen = SimpleNamespace(sequences_ids=[tokens], no_speech_prob=result.no_speech_prob)
        return chosen, log_probabilities[best] / (len(tokens) + 1), 0.0, 1.0

    def forget(self) -> None:
        self._encoded = None


def _is_same(left: npt.NDArray[np.float32], right: npt.NDArray[np.float32]) -> bool:
    """Return whether two inputs differ at most in the last frame, which is left out when words are searched."""
    return left.shape == right.shape and int((left != right).any(axis=0).sum()) <= 1


class SpeechEncoder:
    """Transcribes audio. `spec.options`: `model`: folder of a CTranslate2 model; `words`: a word model."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._words = WordModel.read(Path(spec.options["words"])) if "words" in spec.options else None
        self._model = _Whisper(
            spec.options["model"], device="cpu", compute_type="int8", cpu_threads=_THREADS, local_files_only=True
        )

    def run(self, job: WorkerJob, link: Link) -> WorkerResult:
        if not isinstance(job, Transcribe):
            raise Refusal("it is not audio")
        if job.terms.language and job.terms.language not in self._model.supported_languages:
            raise Refusal(
                f"the language {job.terms.language!r} is not known. Leave it out, to detect the language", "language"
            )
        self._model.words = self._words if self._is_command(job) else None
        # Greedy: five beams hear no better, and take twice the time.
        spoken, info = self._model.transcribe(
            np.frombuffer(job.audio.samples, "<f4"),
            language=job.terms.language or None,
            initial_prompt=job.terms.prompt or None,
            temperature=job.terms.temperature,
            beam_size=1,
            without_timestamps=self._model.words is not None,
            word_timestamps=job.terms.words,
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
                timed = tuple(Word(one.word.strip(), one.start, one.end) for one in segment.words or ())
                segments.append(Segment(words, confidence, segment.start, segment.end, segment.no_speech_prob, timed))
                if job.tell:
                    link.send(SegmentFound(segments[-1]))
        self._model.forget()
        text = " ".join(segment.text for segment in segments)
        return Found(Fact(text, _confidence(segments), info.language if segments else ""), tuple(segments))

    def _is_command(self, job: Transcribe) -> bool:
        """Return whether the clip may be a command: the client set nothing that rules it out."""
        if self._words is None or job.terms.language != self._words.language:
            return False
        return job.audio.seconds <= _COMMAND_S and not (job.terms.prompt or job.terms.temperature or job.terms.words)


def _confidence(segments: list[Segment]) -> float:
    """Return the mean confidence of the segments, weighted by length: exp of the mean log probability of the tokens."""
    weights = [max(segment.end_s - segment.start_s, 0.01) for segment in segments]
    if not weights:
        return 1.0
    confidences = [segment.confidence for segment in segments]
    return sum(weight * one for weight, one in zip(weights, confidences, strict=True)) / sum(weights)
