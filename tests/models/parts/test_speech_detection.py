"""Silero's voice activity detection where faster-whisper brings it: synthesised syllables, noise and a tone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from causeway_server.models.parts.installed import find_speech_detector
from causeway_server.models.parts.process.messages import (
    SPEECH_RATE,
    SPEECH_WINDOW,
    DetectSpeech,
    Refusal,
    SpeechProbabilities,
    WorkerSpec,
)
from causeway_server.models.parts.process.parent import WorkerProcess

from .files import tone, vowels
from .test_decoding import WAIT_S

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_speech_detector() is None, reason="needs faster-whisper (extra voice)"),
]
SECOND = SPEECH_RATE // SPEECH_WINDOW + 1  # windows


@pytest.fixture
async def detector() -> AsyncIterator[WorkerProcess]:
    worker = WorkerProcess(find_speech_detector() or WorkerSpec(""))
    yield worker
    await worker.close()


async def detect(detector: WorkerProcess, pcm: bytes, state: bytes = b"") -> SpeechProbabilities:
    found = await detector.run(DetectSpeech(pcm, state), asyncio.get_running_loop().time() + WAIT_S)
    assert isinstance(found, SpeechProbabilities)
    return found


def pcm(samples: np.ndarray[tuple[int], np.dtype[np.float64]]) -> bytes:
    """Whole windows of it."""
    whole = samples[: samples.size // SPEECH_WINDOW * SPEECH_WINDOW]
    return np.round(whole * 32_000).astype("<i2").tobytes()


async def test_syllables_are_speech_from_beginning_to_end_in_any_pieces(detector: WorkerProcess) -> None:
    silence = np.zeros(SECOND * SPEECH_WINDOW)
    audio = pcm(np.concatenate([silence, vowels(2.0), silence]))
    whole = (await detect(detector, audio)).windows
    assert max(whole[:SECOND]) < 0.35
    assert min(whole[SECOND + 4 : SECOND + 60]) > 0.5
    assert max(whole[-SECOND // 2 :]) < 0.35
    pieces: list[float] = []
    state = b""
    for start in range(0, len(audio), 14 * SPEECH_WINDOW):
        found = await detect(detector, audio[start : start + 14 * SPEECH_WINDOW], state)
        pieces += found.windows
        state = found.state
    assert pieces == pytest.approx(list(whole), abs=1e-3)


async def test_noise_and_a_tone_are_no_speech(detector: WorkerProcess) -> None:
    noise = np.random.default_rng(7).normal(scale=0.05, size=2 * SPEECH_RATE)
    for audio in (noise, tone(2.0, SPEECH_RATE)):
        assert max((await detect(detector, pcm(audio))).windows) < 0.35


async def test_what_is_no_whole_window_is_refused_and_the_next_audio_is_looked_through(detector: WorkerProcess) -> None:
    for wrong, state in ((b"", b""), (bytes(100), b""), (bytes(2 * SPEECH_WINDOW), bytes(8))):
        with pytest.raises(Refusal):
            await detect(detector, wrong, state)
    assert len((await detect(detector, bytes(4 * SPEECH_WINDOW))).windows) == 2
