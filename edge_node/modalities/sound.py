"""The sound of a text, the forms in which it leaves, and the program that speaks."""

from __future__ import annotations

import importlib.util
import io
import shutil
from collections.abc import Mapping

import msgspec

from models.modalities.installed import SPEECH_MODEL

PCM_HZ = 24_000
"""Rate of OpenAI's `pcm`, which has no header to say so."""


class SpokenText(msgspec.Struct, frozen=True):
    """`samples`: int16 little endian, one channel, at `rate` Hz."""

    samples: bytes
    rate: int

    def wav(self) -> bytes:
        """Return it as a WAV file."""
        import wave  # the daemon needs the rest of this module without a sound

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


NO_SPEECH = (
    "this box has nothing that understands speech: `pip install 'causeway[voice]'`, then `causeway-models pull "
    f"{SPEECH_MODEL}`, then restart the daemon."
)
PROGRAM = "espeak-ng"
"""It speaks; a package of the distribution."""


def find_program(environ: Mapping[str, str]) -> str | None:
    """Return the path of the program that speaks; None where it is not installed."""
    return shutil.which(PROGRAM, path=environ.get("PATH", ""))


def is_onnxruntime_installed() -> bool:
    """Whether the package that runs added voices is there; imports nothing of it."""
    return importlib.util.find_spec("onnxruntime") is not None
