"""The sound of a text, and the forms in which it leaves."""

from __future__ import annotations

import io
import wave

import msgspec

PCM_HZ = 24_000
"""Rate of OpenAI's `pcm`, which has no header to say so."""


class SpokenText(msgspec.Struct, frozen=True):
    """`samples`: int16 little endian, one channel, at `rate` Hz."""

    samples: bytes
    rate: int

    def wav(self) -> bytes:
        """Return it as a WAV file."""
        file = io.BytesIO()
        with wave.open(file, "wb") as writer:
            writer.setnchannels(1)
            writer.setsampwidth(2)
            writer.setframerate(self.rate)
            writer.writeframes(self.samples)
        return file.getvalue()

    def pcm(self, rate: int) -> bytes:
        """Return the samples alone, at `rate` Hz."""
        import numpy as np

        from models.modalities.decoding.sound import resample

        samples = np.frombuffer(self.samples, "<i2").astype(np.float32)
        return np.round(resample(samples, self.rate, rate)).astype("<i2").tobytes()
