"""The audio that a client sends to a session: PCM as it arrives, a WAV file in base64 for a request."""

from __future__ import annotations

import base64
import binascii
import struct
from typing import Final

from ..errors import InvalidRequest, UnsupportedFeature

RATE: Final = 24_000
"""Samples per second of `audio/pcm`: 16 bits, little endian, one channel."""
BYTES_PER_S: Final = 2 * RATE
_MIN_S: Final = 0.1


class BufferFull(InvalidRequest, code="input_audio_buffer_full"):
    """The audio is longer than a session may hold."""


class BufferEmpty(InvalidRequest, code="input_audio_buffer_commit_empty"):
    """The buffer has no audio, or too little, for an item."""


class AudioBuffer:
    """The audio that was appended and is not committed, at most `max_s`; positions are bytes since the session began.
    `refusal`: the message to the client of a session without audio.
    """

    def __init__(self, max_s: float, refusal: str) -> None:
        self.max_bytes = round(max_s * RATE) * 2
        self._max_s = max_s
        self._refusal = refusal
        self._pcm = bytearray()
        self.start = 0
        """The position of the first byte."""

    @property
    def end(self) -> int:
        """The position after the last byte."""
        return self.start + len(self._pcm)

    @property
    def held_bytes(self) -> int:
        return len(self._pcm)

    @property
    def is_open(self) -> bool:
        """Whether the session accepts audio."""
        return self.max_bytes > 0

    def check_open(self, param: str) -> None:
        """Check that the session accepts audio. Raises UnsupportedFeature, with `param`, if it does not."""
        if not self.is_open:
            raise self.closed(param)

    def closed(self, param: str) -> UnsupportedFeature:
        """Return the error, with `param`, of a session that does not accept audio."""
        return UnsupportedFeature(f"`{param}`: {self._refusal}", param=param)

    def append(self, encoded: str, bounded_from: int | None = None) -> None:
        """Append base64 audio; what follows `bounded_from` counts to the limit. Raises InvalidRequest, BufferFull."""
        held_bytes = self.end - (self.start if bounded_from is None else bounded_from)
        self._pcm += self._decode(encoded, "audio", held_bytes)

    def pcm(self, start: int, end: int) -> bytes:
        """Return the audio between two positions."""
        return bytes(self._pcm[start - self.start : end - self.start])

    def wav(self, end: int | None = None) -> str:
        """Return the audio, up to this position, as a WAV file in base64. Raise BufferEmpty if it is too short."""
        if end is None:
            return self._wav(bytes(self._pcm), "audio")
        return base64.b64encode(self.file(end)).decode()

    def file(self, end: int) -> bytes:
        """Return the audio up to this position as a WAV file."""
        return wav_file(self.pcm(self.start, end))

    def drop_to(self, position: int) -> None:
        """Drop the audio before this position."""
        if position > self.start:
            del self._pcm[: position - self.start]
            self.start = position

    def read(self, encoded: object, param: str) -> str:
        """Return an item's audio as a WAV file in base64. Raises UnsupportedFeature if the session does not accept
        audio; InvalidRequest if the data is not audio, or too short or too long.
        """
        self.check_open(param.rpartition(".")[0])
        if not isinstance(encoded, str):
            raise InvalidRequest(f"`{param}`: send base64 of 16-bit PCM at {RATE} Hz.", param=param)
        return self._wav(self._decode(encoded, param, 0), param)

    def _decode(self, encoded: str, param: str, held_bytes: int) -> bytes:
        if held_bytes + len(encoded) * 3 // 4 > self.max_bytes + 2:
            message = f"The audio is longer than {self._max_s:g} s (realtime.max_audio_s). Commit it in pieces."
            raise BufferFull(message, param=param)
        try:
            return base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError):
            raise InvalidRequest(f"`{param}` is not base64.", param=param) from None

    def _wav(self, pcm: bytes, param: str) -> str:
        pcm = pcm[: len(pcm) & ~1]
        if len(pcm) < _MIN_S * BYTES_PER_S:
            seconds = len(pcm) / BYTES_PER_S
            raise BufferEmpty(f"The audio is only {seconds:.2f} s long. Send at least {_MIN_S:g} s.", param=param)
        return base64.b64encode(wav_file(pcm)).decode()


def stored_bytes(max_bytes: int, clips: int) -> int:
    """Return the maximum size in bytes, as WAV files in base64, of audio with `max_bytes` of PCM in total."""
    return (max_bytes + 48 * clips) * 4 // 3


def wav_file(pcm: bytes) -> bytes:
    """Return 16-bit PCM at `RATE` as a WAV file."""
    form = struct.pack("<IHHIIHH", 16, 1, 1, RATE, BYTES_PER_S, 2, 16)
    head = b"RIFF" + struct.pack("<I", 36 + len(pcm)) + b"WAVEfmt " + form + b"data" + struct.pack("<I", len(pcm))
    return head + pcm
