"""One branch of the encoder graph reads one kind of part: on this machine, or by the caller's own `Branch`."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from router.types import Modality

from ..installed import DECODER
from ..process.messages import (
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
from ..process.parent import Tell, WorkerProcess

PartJob = DecodeSound | DecodePicture | DecodeText
DECODER_JOBS: Mapping[Modality, Callable[[bytes], PartJob]] = {
    "audio": DecodeSound,
    "image": DecodePicture,
    "file": DecodeText,
}


class ReadPart(msgspec.Struct, frozen=True):
    """What is known of a part. `seconds`: of a sound."""

    found: Found
    seconds: float = 0.0


class Branch(Protocol):
    """Reads one kind of part. `timeout_s`: for each part."""

    @property
    def timeout_s(self) -> float: ...

    async def run(
        self,
        job: PartJob,
        deadline: float,
        language: str = "",
        prompt: str = "",
        temperature: float = 0.0,
        tell: Tell | None = None,
        *,
        words: bool = False,
    ) -> ReadPart:
        """Return what was found.

        Args:
            deadline: the loop's time.
            language, prompt, temperature, words: as `Transcribe`, for a sound.
            tell: gets each segment as soon as it is understood; may not raise.

        Raises:
            Refusal, WorkerTimeout, WorkerFailed.
        """
        ...


class LocalBranch:
    """Decoder and encoder of one kind of part, each a child that starts with the first part."""

    def __init__(
        self,
        encoder: WorkerSpec,
        limits: PartLimits,
        memory_bytes: int,
        timeout_s: float,
        language: str,
        python: str = sys.executable,
    ) -> None:
        self._language = language
        self.decoder = WorkerProcess(WorkerSpec(DECODER, limits, memory_bytes=memory_bytes), python=python)
        self.encoder = WorkerProcess(encoder, python=python)
        self.timeout_s = timeout_s

    async def run(
        self,
        job: PartJob,
        deadline: float,
        language: str = "",
        prompt: str = "",
        temperature: float = 0.0,
        tell: Tell | None = None,
        *,
        words: bool = False,
    ) -> ReadPart:
        """Raises Refusal, WorkerTimeout or WorkerFailed."""
        decoded = await self.decoder.run(job, deadline)
        if isinstance(decoded, Found):  # text: nothing is left to encode
            return ReadPart(decoded)
        assert isinstance(decoded, Sound | Picture)
        if isinstance(decoded, Picture):
            found, seconds = await self.encoder.run(decoded, deadline), 0.0
        else:
            transcribe = Transcribe(decoded, language or self._language, prompt, temperature, tell is not None, words)
            found = await self.encoder.run(transcribe, deadline, tell)
            seconds = decoded.seconds
        assert isinstance(found, Found)
        return ReadPart(found, seconds)

    @property
    def starts(self) -> int:
        """Children started so far."""
        return self.decoder.starts + self.encoder.starts

    @property
    def running(self) -> int:
        """Children that are there: one that was killed counts until the next part needs it."""
        return sum(child.pid is not None for child in (self.decoder, self.encoder))

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


class Memory(Protocol):
    """Remembers what was found, for those that may know it."""

    def find(self, reader: Modality, sha256: str) -> ReadPart | None: ...

    def keep(self, reader: Modality, sha256: str, read: ReadPart) -> None: ...


class PartMemory:
    """A memory of all parts of a process. `limit`: parts; the one that was kept first is forgotten."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: OrderedDict[tuple[Modality, str], ReadPart] = OrderedDict()

    def find(self, reader: Modality, sha256: str) -> ReadPart | None:
        return self._kept.get((reader, sha256))

    def keep(self, reader: Modality, sha256: str, read: ReadPart) -> None:
        self._kept[reader, sha256] = read
        if len(self._kept) > self._limit:
            self._kept.popitem(last=False)
