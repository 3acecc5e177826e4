"""Transcription of audio clips: Whisper by faster-whisper (CTranslate2, int8), after voice activity detection (Silero).

Whisper invents words if there is no speech, so it gets only the sections that the detection takes for speech. It always
encodes windows of 30 s. For a command, which is a short clip in the language of the word model, the window is a third
of that, which takes a fifth of the time. A command is transcribed as it is and a tenth slower, after half a second of
silence, without which Whisper misses first words; the word model chooses among the likeliest transcripts of both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from faster_whisper import WhisperModel
from faster_whisper.audio import pad_or_trim
from faster_whisper.tokenizer import Tokenizer
from faster_whisper.transcribe import get_suppressed_tokens
from faster_whisper.vad import collect_chunks, get_speech_timestamps

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
_HZ = 16_000
_COMMAND_S = 8.5
_COMMAND_FRAMES = 1000  # of 10 ms; of 3000
_COMMAND_TOKENS = 100  # in case it repeats itself
_SILENCE_S = 0.5  # before a command
_SPEEDS = (1.0, 0.9)
_TRANSCRIPTS = 24  # at each speed

Samples = npt.NDArray[np.float32]  # [samples], at 16 kHz


class _Whisper(WhisperModel):  # type: ignore[misc]  # the package has no types
    """Whisper with one encoding per audio clip; faster-whisper alone makes two."""

    _encoded: tuple[npt.NDArray[np.float32], object] | None = None

    def encode(self, features: npt.NDArray[np.float32]) -> object:
        """Return the encoder's output. `features`: [mel bins, frames of 10 ms]."""
        if self._encoded is None or not _is_same(self._encoded[0], features):
            self._encoded = features, super().encode(features)
        return self._encoded[1]

    def hear(self, clips: Sequence[Samples], language: str, transcripts: int) -> tuple[list[tuple[str, float]], float]:
        """Return likely transcripts of clips of at most 10 s, each with its natural log probability, and the
        probability that the first clip is not speech.
        """
        tokenizer = Tokenizer(self.hf_tokenizer, self.model.is_multilingual, task="transcribe", language=language)
        features = [pad_or_trim(self.feature_extractor(clip), _COMMAND_FRAMES) for clip in clips]
        prompt = self.get_prompt(tokenizer, [], without_timestamps=True)
        results = self.model.generate(
            super().encode(np.stack(features)),
            [prompt] * len(clips),
            beam_size=transcripts,
            num_hypotheses=transcripts,
            max_length=len(prompt) + _COMMAND_TOKENS,
            suppress_tokens=get_suppressed_tokens(tokenizer, [-1]),
            return_scores=True,
            return_no_speech_prob=True,
        )
        found = [
            (tokenizer.decode([one for one in tokens if one < tokenizer.eot]).strip(), score * len(tokens))
            for result in results
            for tokens, score in zip(result.sequences_ids, result.scores, strict=True)
        ]
        return found, results[0].no_speech_prob

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
            raise Refusal("the part is not audio")
        if job.terms.language and job.terms.language not in self._model.supported_languages:
            raise Refusal(
                f"the language {job.terms.language!r} is not known. Leave the language out, so that it is detected",
                "language",
            )
        samples = np.frombuffer(job.audio.samples, "<f4")
        if self._words is not None and self._is_command(job, self._words):
            return self._hear_command(samples, self._words, link if job.tell else None)
        # Greedy: five beams hear no better, and take twice the time.
        spoken, info = self._model.transcribe(
            samples,
            language=job.terms.language or None,
            initial_prompt=job.terms.prompt or None,
            temperature=job.terms.temperature,
            beam_size=1,
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

    def _is_command(self, job: Transcribe, words: WordModel) -> bool:
        """Return whether the clip may be a command: the client set nothing that rules it out."""
        if job.terms.language != words.language:
            return False
        return job.audio.seconds <= _COMMAND_S and not (job.terms.prompt or job.terms.temperature or job.terms.words)

    def _hear_command(self, samples: Samples, words: WordModel, link: Link | None) -> WorkerResult:
        sections = get_speech_timestamps(samples)
        if not sections:
            return Found(Fact("", 1.0))
        speech = np.concatenate(collect_chunks(samples, sections)[0])
        heard, no_speech = self._model.hear([_at(speed, speech) for speed in _SPEEDS], words.language, _TRANSCRIPTS)
        best, confidence = words.best(heard)
        start_s, end_s = sections[0]["start"] / _HZ, sections[-1]["end"] / _HZ
        segment = Segment(heard[best][0], confidence, start_s, end_s, no_speech)
        if link is not None:
            link.send(SegmentFound(segment))
        return Found(Fact(segment.text, confidence, words.language if segment.text else ""), (segment,))


def _at(speed: float, speech: Samples) -> Samples:
    """Return speech at a speed, which changes its pitch, too, after silence."""
    at = np.arange(0, len(speech) - 1, speed)
    spoken = np.interp(at, np.arange(len(speech)), speech)
    return np.concatenate([np.zeros(int(_SILENCE_S * _HZ)), spoken]).astype(np.float32)


def _confidence(segments: list[Segment]) -> float:
    """Return the mean confidence of the segments, weighted by length: exp of the mean log probability of the tokens."""
    weights = [max(segment.end_s - segment.start_s, 0.01) for segment in segments]
    if not weights:
        return 1.0
    confidences = [segment.confidence for segment in segments]
    return sum(weight * one for weight, one in zip(weights, confidences, strict=True)) / sum(weights)
