"""Compressed audio clips through the real decoder: whole, cut off, and under another kind's name."""

from __future__ import annotations

import numpy as np
import pytest

from causeway_server.models.parts.decoding.audio import decode_audio
from causeway_server.models.parts.process.messages import SAMPLE_RATE, Refusal

from .compressed import COMPRESSED, compressed

pytest.importorskip("av")


@pytest.mark.parametrize("kind", COMPRESSED)
def test_a_compressed_audio_is_decoded_by_its_bytes(kind: str) -> None:
    """A second of a tone; what the client calls the file plays no part."""
    samples = np.frombuffer(decode_audio(compressed(kind), 60.0).samples, "<f4")
    assert samples.size / SAMPLE_RATE == pytest.approx(1.0, abs=0.1)
    spectrum = np.abs(np.fft.rfft(samples[: SAMPLE_RATE // 2]))
    assert abs(int(spectrum.argmax()) * 2 - 440) <= 4


@pytest.mark.parametrize("kind", COMPRESSED)
@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.95])
def test_an_audio_clip_that_is_cut_off_is_refused(kind: str, share: float) -> None:
    """Its beginning is not understood as the whole."""
    data = compressed(kind)
    with pytest.raises(Refusal, match="Send WAV with 16-bit PCM"):
        decode_audio(data[: round(share * len(data))], 60.0)


def test_an_audio_clip_without_its_last_bytes_is_refused() -> None:
    for kind in COMPRESSED:
        with pytest.raises(Refusal, match=r"cut off|broken"):
            decode_audio(compressed(kind)[:-20], 60.0)


@pytest.mark.parametrize("kind", COMPRESSED)
def test_a_compressed_audio_that_is_too_long_is_refused(kind: str) -> None:
    with pytest.raises(Refusal, match=r"longer than 0\.5 s\. Send it in pieces"):
        decode_audio(compressed(kind), 0.5)
