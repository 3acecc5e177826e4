"""The branches of the encoder graph, which read parts: one for each kind of part here, or a caller's `Branch`.

`SpeechDetection` serves live sessions.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from causeway_server.router.errors import EncoderFailed
from causeway_server.router.types import Modality

from ..installed import DECODER
from ..process.messages import (
    AudioSamples,
    AudioTerms,
    Decode,
    DetectSpeech,
    Found,
    ImagePixels,
    ImageSize,
    MeasureImage,
    PartLimits,
    Refusal,
    SpeechProbabilities,
    Transcribe,
    WorkerSpec,
)
from ..process.parent import Tell, WorkerFailed, WorkerProcess

PLAIN = AudioTerms()
"""The default priority: of audio in a message, and of a request for transcription alone."""
PartKey = tuple[Modality, str]
"""A key of cached facts: the reader of a part, and the part's hash."""
log = logging.getLogger(__name__)
_START_S = 60.0  # of a child that loads its model first, on a machine that does much else
_TIMEOUT_S = 10.0  # a window takes a millisecond


class ReadPart(msgspec.Struct, frozen=True):
    """The result for a part. `seconds`: the length of an audio clip."""

    found: Found
    seconds: float = 0.0


class Branch(Protocol):
    """Reads one kind of part. `timeout_s`: time limit of each part."""

    @property
    def timeout_s(self) -> float: ...

    async def run(self, part: bytes, deadline: float, terms: AudioTerms = PLAIN, tell: Tell | None = None) -> ReadPart:
        """Read one part and return its facts. Raises Refusal, WorkerTimeout or WorkerFailed.

        `deadline`: of the event loop. `tell` gets each segment as soon as it is understood; may not raise.
        """
        ...


class LocalBranch:
    """Decoder and encoder of one kind of part. Each is a child that starts with the first part."""

    def __init__(
        self,
        kind: Modality,
        encoder: WorkerSpec,
        limits: PartLimits,
        memory_bytes: int,
        timeout_s: float,
        language: str,
        python: str = sys.executable,
    ) -> None:
        self._kind = kind
        self._language = language
        self.decoder = WorkerProcess(WorkerSpec(DECODER, limits, memory_bytes=memory_bytes), python=python)
        self.encoder = WorkerProcess(encoder, python=python)
        self.timeout_s = timeout_s

    async def run(self, part: bytes, deadline: float, terms: AudioTerms = PLAIN, tell: Tell | None = None) -> ReadPart:
        """Read a part. Raises Refusal, WorkerTimeout or WorkerFailed."""
        decoded = await self.decoder.run(Decode(self._kind, part), deadline)
        if isinstance(decoded, Found):  # text: nothing is left to encode
            return ReadPart(decoded)
        assert isinstance(decoded, AudioSamples | ImagePixels)
        if isinstance(decoded, ImagePixels):
            found, seconds = await self.encoder.run(decoded, deadline), 0.0
        else:
            terms = msgspec.structs.replace(terms, language=terms.language or self._language)
            found = await self.encoder.run(Transcribe(decoded, terms, tell is not None), deadline, tell)
            seconds = decoded.seconds
        assert isinstance(found, Found)
        return ReadPart(found, seconds)

    @property
    def starts(self) -> int:
        """Number of children started so far."""
        return self.decoder.starts + self.encoder.starts

    @property
    def running(self) -> int:
        """Number of children that exist. One that was killed counts until the next part replaces it."""
        return sum(child.pid is not None for child in (self.decoder, self.encoder))

    async def pixels(self, image: bytes, deadline: float) -> int:
        """Return width × height in pixels, as the file declares them. Raises as `run`."""
        size = await self.decoder.run(MeasureImage(image), deadline)
        assert isinstance(size, ImageSize)
        return size.width * size.height

    async def seconds(self, audio: bytes, deadline: float) -> float:
        """Decode the audio and return its length in seconds. Raises as `run`."""
        decoded = await self.decoder.run(Decode(self._kind, audio), deadline)
        assert isinstance(decoded, AudioSamples)
        return decoded.seconds

    async def close(self) -> None:
        await self.decoder.close()
        await self.encoder.close()


class Memory(Protocol):
    """Caches facts of parts, for the requests that may share them."""

    def find(self, reader: Modality, sha256: str) -> ReadPart | None: ...

    def keep(self, reader: Modality, sha256: str, read: ReadPart) -> None: ...


class PartMemory:
    """A cache of the facts of a process's parts: at most `limit`, for `remembered_s`, by a monotonic clock."""

    def __init__(self, limit: int, remembered_s: float = math.inf, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._remembered_s = remembered_s
        self._clock = clock
        self._kept: OrderedDict[PartKey, tuple[float, ReadPart]] = OrderedDict()

    def find(self, reader: Modality, sha256: str) -> ReadPart | None:
        until, read = self._kept.get((reader, sha256), (0.0, None))
        return read if self._clock() < until else None

    def keep(self, reader: Modality, sha256: str, read: ReadPart) -> None:
        self._kept.pop((reader, sha256), None)
        self._kept[reader, sha256] = self._clock() + self._remembered_s, read
        if len(self._kept) > self._limit:
            self._kept.popitem(last=False)

    def clear(self) -> None:
        self._kept.clear()


class SpeechDetection:
    """Detects speech for all sessions. The child starts with the first audio."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._worker = WorkerProcess(spec)
        self._timeout_s = _START_S

    async def run(self, pcm: bytes, state: bytes) -> tuple[Sequence[float], bytes]:
        """Return each window's probability of speech, and the next state. Raises EncoderFailed if late."""
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        try:
            found = await self._worker.run(DetectSpeech(pcm, state), deadline)
        except (WorkerFailed, Refusal) as error:
            self._timeout_s = _START_S  # the next one may begin in a new child
            log.warning("Speech detection failed: %s.", error)
            raise EncoderFailed(
                f"Speech turns cannot be detected now: {error}. Continue to send audio, or commit the audio yourself."
            ) from None
        assert isinstance(found, SpeechProbabilities)
        self._timeout_s = _TIMEOUT_S
        return found.windows, found.state

    async def close(self) -> None:
        """End the child."""
        await self._worker.close()
