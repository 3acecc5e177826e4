"""One branch of the encoder graph: decoder and encoder of one kind of part, each a child."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from models.modalities.process.messages import (
    DecodePicture,
    DecodeSound,
    DecodeText,
    Found,
    MeasurePicture,
    PartLimits,
    Picture,
    PictureSize,
    Sound,
    Transcribe,
    WorkerSpec,
)
from models.modalities.process.parent import Tell, WorkerProcess
from router.types import Modality

from .boxed import DECODER

DECODER_JOBS: Mapping[Modality, Callable[[bytes], DecodeSound | DecodePicture | DecodeText]] = {
    "audio": DecodeSound,
    "image": DecodePicture,
    "file": DecodeText,
}


class ReadPart(msgspec.Struct, frozen=True):
    """What is known of a part. `seconds`: of a sound."""

    found: Found
    seconds: float = 0.0


class Branch:
    """Decoder and encoder of one kind of part, each a child that starts with the first part."""

    def __init__(
        self, encoder: WorkerSpec, limits: PartLimits, memory_bytes: int, timeout_s: float, language: str
    ) -> None:
        self._language = language
        self.decoder = WorkerProcess(WorkerSpec(DECODER, limits, memory_bytes=memory_bytes))
        self.encoder = WorkerProcess(encoder)
        self.timeout_s = timeout_s

    async def run(
        self,
        job: DecodeSound | DecodePicture | DecodeText,
        deadline: float,
        language: str = "",
        prompt: str = "",
        temperature: float = 0.0,
        tell: Tell | None = None,
    ) -> ReadPart:
        """Raises Refusal, WorkerTimeout or WorkerFailed."""
        decoded = await self.decoder.run(job, deadline)
        if isinstance(decoded, Found):  # text: nothing is left to encode
            return ReadPart(decoded)
        assert isinstance(decoded, Sound | Picture)
        if isinstance(decoded, Picture):
            found, seconds = await self.encoder.run(decoded, deadline), 0.0
        else:
            transcribe = Transcribe(decoded, language or self._language, prompt, temperature, tell is not None)
            found = await self.encoder.run(transcribe, deadline, tell)
            seconds = decoded.seconds
        assert isinstance(found, Found)
        return ReadPart(found, seconds)

    async def pixels(self, picture: bytes, deadline: float) -> int:
        """Width × height as the file declares them. Raises as `run`."""
        size = await self.decoder.run(MeasurePicture(picture), deadline)
        assert isinstance(size, PictureSize)
        return size.width * size.height

    async def seconds(self, sound: bytes, deadline: float) -> float:
        """Length of the sound, decoded. Raises as `run`."""
        decoded = await self.decoder.run(DecodeSound(sound), deadline)
        assert isinstance(decoded, Sound)
        return decoded.seconds

    async def close(self) -> None:
        await self.decoder.close()
        await self.encoder.close()
