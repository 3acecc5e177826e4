"""Sound that a client sends to a session: PCM as it comes, a WAV file in base64 for a request."""

from __future__ import annotations

import base64
import binascii
import struct
from typing import Final

from ..errors import InvalidRequest, UnsupportedFeature

RATE: Final = 24_000
"""Samples per second of `audio/pcm`: 16 bits, little endian, one channel."""
_BYTES_PER_S: Final = 2 * RATE
_SHORTEST_S: Final = 0.1


class BufferFull(InvalidRequest):
    """The sound is longer than a session may hold."""

    code = "input_audio_buffer_full"


class BufferEmpty(InvalidRequest):
    """There is no sound to make an item of."""

    code = "input_audio_buffer_commit_empty"


class SoundBuffer:
    """What was appended and is not committed yet.

    Args:
        max_s: longest sound in seconds; 0: the session takes no sound.
        refusal: why it takes none, and what to do, for the client.
    """

    def __init__(self, max_s: float, refusal: str) -> None:
        self.max_bytes = round(max_s * RATE) * 2
        self._max_s = max_s
        self._refusal = refusal
        self._pcm = bytearray()

    @property
    def is_open(self) -> bool:
        """Whether the session takes sound."""
        return self.max_bytes > 0

    def check_open(self, param: str) -> None:
        """Raises UnsupportedFeature, about `param`, if the session takes no sound."""
        if not self.is_open:
            raise UnsupportedFeature(f"`{param}`: {self._refusal}", param=param)

    def append(self, encoded: str) -> None:
        """Raises InvalidRequest or BufferFull."""
        self._pcm += self._decode(encoded, "audio", len(self._pcm))

    def wav(self) -> str:
        """Return the sound as a WAV file in base64. Raises BufferEmpty."""
        return self._wav(bytes(self._pcm), "audio")

    def clear(self) -> None:
        self._pcm.clear()

    def read(self, encoded: object, param: str) -> str:
        """Return the sound of an item as a WAV file in base64.

        Raises:
            UnsupportedFeature: the session takes no sound.
            InvalidRequest: it is no sound, too short or too long.
        """
        self.check_open(param.rpartition(".")[0])
        if not isinstance(encoded, str):
            raise InvalidRequest(f"`{param}`: send base64 of 16-bit PCM at {RATE} Hz.", param=param)
        return self._wav(self._decode(encoded, param, 0), param)

    def _decode(self, encoded: str, param: str, held_bytes: int) -> bytes:
        if held_bytes + len(encoded) * 3 // 4 > self.max_bytes + 2:
            message = f"The sound is longer than {self._max_s:g} s (realtime.max_audio_s). Commit it in pieces."
            raise BufferFull(message, param=param)
        try:
            return base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError):
            raise InvalidRequest(f"`{param}` is no base64.", param=param) from None

    def _wav(self, pcm: bytes, param: str) -> str:
        pcm = pcm[: len(pcm) & ~1]
        if len(pcm) < _SHORTEST_S * _BYTES_PER_S:
            seconds = len(pcm) / _BYTES_PER_S
            raise BufferEmpty(f"The sound has {seconds:.2f} s. Send at least {_SHORTEST_S:g} s.", param=param)
        return base64.b64encode(_wav_header(len(pcm)) + pcm).decode()


def stored_bytes(max_bytes: int, sounds: int) -> int:
    """How large sounds of `max_bytes` together are at most as WAV files in base64."""
    return (max_bytes + 48 * sounds) * 4 // 3


def _wav_header(size: int) -> bytes:
    form = struct.pack("<IHHIIHH", 16, 1, 1, RATE, _BYTES_PER_S, 2, 16)
    return b"RIFF" + struct.pack("<I", 36 + size) + b"WAVEfmt " + form + b"data" + struct.pack("<I", size)
