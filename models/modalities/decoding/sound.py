"""Sound: WAV (PCM of 8 to 32 bits) by the standard library, everything else by PyAV where it is installed.

Whatever a header says, the samples that are there count: their number bounds the length, and nothing is allocated for
samples that a header promises. A file that says that there is more of it is refused: its beginning must not be
understood as the whole.
"""

from __future__ import annotations

import io
import struct
import wave
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import numpy.typing as npt

from ..process.messages import SAMPLE_RATE, Refusal, Sound
from .truncation import is_cut_off

Samples = npt.NDArray[np.float32]  # [n] in [-1, 1]

_RATES = range(4_000, 192_001)  # Hz
_MAX_CHANNELS = 8
TAPS = 65
"""Of the low-pass filter before a lower rate."""
_CUT_S = 0.1  # a shorter difference is rounding
_SEND = "Send WAV with 16-bit PCM"


def decode_sound(data: bytes, max_s: float) -> Sound:
    """Return the sound as one channel at `SAMPLE_RATE`.

    Raises:
        Refusal: it cannot be decoded, is empty or longer than `max_s` seconds.
    """
    if not data:
        raise Refusal(f"it is empty. {_SEND}")
    if is_cut_off(data):
        raise Refusal(f"it is cut off: its end is missing. Send the whole file. {_SEND}")
    samples, rate = _decode_wav(data, max_s) if data[:4] == b"RIFF" and data[8:12] == b"WAVE" else _by_pyav(data, max_s)
    if not samples.size:
        raise Refusal(f"it has no samples. {_SEND}")
    return Sound(np.ascontiguousarray(resample(samples, rate), "<f4").tobytes())


def resample(samples: Samples, rate: int, to: int = SAMPLE_RATE) -> Samples:
    """Convert from `rate` to `to` Hz: a windowed-sinc low-pass filter if the rate falls, then interpolation."""
    if rate == to or samples.size < 2:
        return samples
    if rate > to and samples.size > TAPS:
        samples = np.convolve(samples, low_pass(rate, to), mode="same").astype(np.float32)
    at = np.arange(int(samples.size * to / rate)) * (rate / to)
    interpolated: Samples = np.interp(at, np.arange(samples.size), samples).astype(np.float32)
    return interpolated


def low_pass(rate: int, to: int) -> npt.NDArray[np.float64]:
    """Return the filter before the samples of a lower rate are taken: `TAPS` factors."""
    cutoff = 0.45 * to / rate  # of the sample rate
    window = np.sinc(2 * cutoff * (np.arange(TAPS) - TAPS // 2)) * np.hamming(TAPS)
    factors: npt.NDArray[np.float64] = window / window.sum()
    return factors


def _decode_wav(data: bytes, max_s: float) -> tuple[Samples, int]:
    try:
        with wave.open(io.BytesIO(data)) as file:
            rate, channels, width = file.getframerate(), file.getnchannels(), file.getsampwidth()
            _check(rate, channels)
            _check_length(len(data) / (channels * width * rate), max_s)  # before anything is copied
            frames = file.readframes(file.getnframes())
    except wave.Error as error:
        if "unknown format" in str(error):  # floats, compressed, or an extensible header
            return _by_pyav(data, max_s)
        raise Refusal(f"its WAV header is invalid ({error}). {_SEND}") from None
    except (EOFError, ValueError, OverflowError, RuntimeError, struct.error):  # RuntimeError: a seek past the end
        raise Refusal(f"its WAV header is cut off or invalid. {_SEND}") from None
    if width not in _WIDTHS:
        raise Refusal(f"its samples have {8 * width} bits. {_SEND}")
    frames = frames[: len(frames) - len(frames) % (width * channels)]
    samples = _WIDTHS[width](frames)
    mono: Samples = samples.reshape(-1, channels).mean(axis=1, dtype=np.float32)
    return mono, rate


def _check(rate: int, channels: int) -> None:
    if rate not in _RATES:
        raise Refusal(f"its sample rate is {rate} Hz. Send {_RATES[0]} to {_RATES[-1]} Hz")
    if channels not in range(1, _MAX_CHANNELS + 1):
        raise Refusal(f"it has {channels} channels. Send at most {_MAX_CHANNELS}")


def _check_length(seconds: float, max_s: float) -> None:
    if seconds > max_s:
        raise Refusal(f"it is longer than {max_s:g} s. Send it in pieces")


def _bits24(frames: bytes) -> Samples:
    bytes_of = np.frombuffer(frames, np.uint8).reshape(-1, 3)
    words = np.zeros((len(bytes_of), 4), np.uint8)
    words[:, 1:] = bytes_of  # the sample in the upper bytes of a 32-bit word
    return _bits32(words.tobytes())


def _bits32(frames: bytes) -> Samples:
    return (np.frombuffer(frames, "<i4") / 2.0**31).astype(np.float32)


_WIDTHS: Mapping[int, Callable[[bytes], Samples]] = {  # by bytes per sample
    1: lambda frames: (np.frombuffer(frames, np.uint8).astype(np.float32) - 128.0) / 128.0,
    2: lambda frames: np.frombuffer(frames, "<i2").astype(np.float32) / 2.0**15,
    3: _bits24,
    4: _bits32,
}


def _by_pyav(data: bytes, max_s: float) -> tuple[Samples, int]:
    """Decode MP3, FLAC, Ogg, MP4, WebM and the rarer kinds of WAV. PyAV comes with the extra `voice`."""
    try:
        import av
    except ModuleNotFoundError:
        raise Refusal(f"it is no WAV file with PCM, and this box decodes no other kind. {_SEND}") from None
    blocks: list[Samples] = []
    seconds = 0.0
    try:
        declared_s = _declared_s(av, data)
        for block in _av_blocks(av, data):
            seconds += block.size / SAMPLE_RATE
            _check_length(seconds, max_s)
            blocks.append(block)
        if declared_s - seconds > _CUT_S:
            raise Refusal(f"it is cut off: {declared_s:.1f} s are declared, {seconds:.1f} s are there. {_SEND}")
    except (av.FFmpegError, ValueError, IndexError):
        raise Refusal(f"it is broken, cut off or of a kind that cannot be decoded. {_SEND}") from None
    return np.concatenate(blocks) if blocks else np.zeros(0, np.float32), SAMPLE_RATE


def _declared_s(av: object, data: bytes) -> float:
    """Return the length that the header of a FLAC counts, s; 0 for other kinds, whose length is estimated."""
    if data[:4] != b"fLaC":
        return 0.0
    with av.open(io.BytesIO(data), mode="r", options={"protocol_whitelist": ""}) as container:  # type: ignore[attr-defined]
        return float(container.duration or 0) / float(av.time_base)  # type: ignore[attr-defined]


def _av_blocks(av: object, data: bytes) -> Iterator[Samples]:
    # Without a protocol other than this object: a playlist inside the file can open nothing.
    with av.open(io.BytesIO(data), mode="r", options={"protocol_whitelist": ""}) as container:  # type: ignore[attr-defined]
        resampler = av.AudioResampler(format="flt", layout="mono", rate=SAMPLE_RATE)  # type: ignore[attr-defined]
        for frame in container.decode(audio=0):
            for part in resampler.resample(frame):
                yield part.to_ndarray().reshape(-1)
