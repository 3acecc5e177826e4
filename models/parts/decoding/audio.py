"""Decoding of audio: WAV (PCM of 8 to 32 bits) by the standard library, all other formats by PyAV if it is installed.

Only samples that are in the file count: their number bounds the length, and nothing is allocated for samples that a
header merely declares. A file that declares more data than it has was cut off while it was uploaded or written, and is
refused, because its beginning must not be taken for the whole. Decoders would read it without an error. Each check
walks the frames of one container without decoding samples; a file that breaks its format is left to the decoder.

    WAV    RIFF: the chunk `data` has fewer bytes than it says; a recorder that never knew its length says 2 GiB or more
    Ogg    RFC 3533: the last page is incomplete, or does not end its stream
    WebM   RFC 8794: an element has fewer bytes than it says; a live recording says no length of segment and clusters
    MP4    ISO/IEC 14496-12: a box has fewer bytes than it says
    MP3    ISO/IEC 11172-3: the last frame is incomplete, or there are fewer bytes than the Xing header counts
"""

from __future__ import annotations

import io
import struct
import wave
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import numpy.typing as npt

from ..process.messages import SAMPLE_RATE, AudioSamples, Refusal

Samples = npt.NDArray[np.float32]  # [n] in [-1, 1]

_RATES = range(4_000, 192_001)  # Hz
_MAX_CHANNELS = 8
TAPS = 65
"""The number of coefficients of the low-pass filter before downsampling."""
_CUT_S = 0.1  # a shorter difference is rounding
_SEND = "Send WAV with 16-bit PCM"
_UNKNOWN_BYTES = 0x7FFF_0000
_MASTERS = frozenset({0x18538067, 0x1F43B675})  # WebM's segment and cluster: elements whose children are walked
_MP3_RATES = (44_100, 48_000, 32_000)
_MP3_KBITS = {  # of layer III, by whether it is MPEG-1
    True: (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    False: (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}


def decode_audio(data: bytes, max_s: float) -> AudioSamples:
    """Return the audio as one channel at `SAMPLE_RATE`. Raises Refusal, also beyond `max_s` seconds."""
    if not data:
        raise Refusal(f"the audio is empty. {_SEND}")
    if is_cut_off(data):
        raise Refusal(f"the audio is cut off: its end is missing. Send the whole file. {_SEND}")
    samples, rate = _decode_wav(data, max_s) if data[:4] == b"RIFF" and data[8:12] == b"WAVE" else _by_pyav(data, max_s)
    if not samples.size:
        raise Refusal(f"the audio has no samples. {_SEND}")
    return AudioSamples(np.ascontiguousarray(resample(samples, rate), "<f4").tobytes())


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
    """Return the low-pass filter for downsampling from `rate` to `to` Hz: `TAPS` coefficients."""
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
        raise Refusal(f"the WAV header of the audio is invalid ({error}). {_SEND}") from None
    except (EOFError, ValueError, OverflowError, RuntimeError, struct.error):  # RuntimeError: a seek past the end
        raise Refusal(f"the WAV header of the audio is cut off or invalid. {_SEND}") from None
    if width not in _WIDTHS:
        raise Refusal(f"the samples of the audio have {8 * width} bits. {_SEND}")
    frames = frames[: len(frames) - len(frames) % (width * channels)]
    samples = _WIDTHS[width](frames)
    mono: Samples = samples.reshape(-1, channels).mean(axis=1, dtype=np.float32)
    return mono, rate


def _check(rate: int, channels: int) -> None:
    if rate not in _RATES:
        raise Refusal(f"the sample rate of the audio is {rate} Hz. Send {_RATES[0]} to {_RATES[-1]} Hz")
    if channels not in range(1, _MAX_CHANNELS + 1):
        raise Refusal(f"the audio has {channels} channels. Send at most {_MAX_CHANNELS}")


def _check_length(seconds: float, max_s: float) -> None:
    if seconds > max_s:
        raise Refusal(f"the audio is longer than {max_s:g} s. Send the audio in pieces")


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
        raise Refusal(
            f"the audio is not a WAV file with PCM, and this device decodes no other format. {_SEND}"
        ) from None
    blocks: list[Samples] = []
    seconds = 0.0
    try:
        declared_s = _declared_s(av, data)
        for block in _av_blocks(av, data):
            seconds += block.size / SAMPLE_RATE
            _check_length(seconds, max_s)
            blocks.append(block)
        if declared_s - seconds > _CUT_S:
            raise Refusal(
                f"the audio is cut off: {declared_s:.1f} s are declared, but only {seconds:.1f} s are there. {_SEND}"
            )
    except (av.FFmpegError, ValueError, IndexError):
        raise Refusal(f"the audio is broken, cut off or in a format that cannot be decoded. {_SEND}") from None
    return np.concatenate(blocks) if blocks else np.zeros(0, np.float32), SAMPLE_RATE


def _declared_s(av: object, data: bytes) -> float:
    """Return the length in seconds that a FLAC's header declares; 0 for others, which are estimated."""
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


def is_cut_off(data: bytes) -> bool:
    """Return whether the file declares more data than it has."""
    for at, start, check in _CHECKS:
        if data[at : at + len(start)] == start:
            return check(data)
    return _mp3_is_cut(data) if data[:3] == b"ID3" or _mp3_frame(data, 0) else False


def _wav_is_cut(data: bytes) -> bool:
    at = 12
    while at + 8 <= len(data):
        size = int.from_bytes(data[at + 4 : at + 8], "little")
        if data[at : at + 4] == b"data":
            return at + 8 + size > len(data) and 0 < size < _UNKNOWN_BYTES
        at += 8 + size + size % 2
    return False


def _ogg_is_cut(data: bytes) -> bool:
    at, is_last = 0, False
    while at < len(data):
        header = data[at : at + 27]
        if header[:4] != b"OggS":
            return not is_last  # what follows the last page is none of the stream
        if len(header) < 27:
            return True
        segments = data[at + 27 : at + 27 + header[26]]
        end = at + 27 + header[26] + sum(segments)
        if len(segments) < header[26] or end > len(data):
            return True
        is_last, at = bool(header[5] & 4), end
    return not is_last


def _webm_is_cut(data: bytes) -> bool:
    at = 0
    while at < len(data):
        element, size_at = _vint(data, at, keeps_marker=True)
        size, body = _vint(data, size_at)
        if size is None or element is None:
            return True  # within an element's header
        is_unknown = size == (1 << (7 * (body - size_at))) - 1
        if not is_unknown and body + size > len(data):
            return True
        at = body if element in _MASTERS else body + size
        if is_unknown and element not in _MASTERS:
            return False
    return False


def _vint(data: bytes, at: int, *, keeps_marker: bool = False) -> tuple[int | None, int]:
    """Return a variable-length number and the offset after it; None if the data ends inside or before it."""
    if at >= len(data) or not data[at]:
        return None, at
    length = 9 - data[at].bit_length()
    number = int.from_bytes(data[at : at + length], "big")
    marker = 0 if keeps_marker else 1 << (7 * length)
    return (number - marker if at + length <= len(data) else None), at + length


def _mp4_is_cut(data: bytes) -> bool:
    at = 0
    while at + 8 <= len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        if size == 1:
            size = int.from_bytes(data[at + 8 : at + 16], "big")
        if size < 8:
            return False  # 0: up to the end of the file
        at += size
    return at != len(data)


def _mp3_is_cut(data: bytes) -> bool:
    at = _id3_bytes(data)
    if at > len(data):
        return True
    counted = _xing_bytes(data, at)
    if counted:
        return at + counted > len(data)
    while (size := _mp3_frame(data, at)) and at < len(data):
        at += size
    return at > len(data)


def _id3_bytes(data: bytes) -> int:
    """Return the length of the ID3 tag before the first frame."""
    if data[:3] != b"ID3" or len(data) < 10:
        return 0
    size = 0
    for byte in data[6:10]:
        size = size << 7 | byte & 0x7F
    return 10 + size


def _xing_bytes(data: bytes, at: int) -> int:
    """Return the number of bytes of frames that the Xing header in the first frame declares; 0 if there is none."""
    size = _mp3_frame(data, at)
    frame = data[at : at + size]
    for name in (b"Xing", b"Info"):
        if (found := frame.find(name)) >= 0:
            flags = int.from_bytes(frame[found + 4 : found + 8], "big")
            place = found + 8 + (4 if flags & 1 else 0)
            return int.from_bytes(frame[place : place + 4], "big") if flags & 2 else 0
    return 0


def _mp3_frame(data: bytes, at: int) -> int:
    """Return the length of the layer III frame whose header is at an offset; 0 if there is none."""
    header = int.from_bytes(data[at : at + 4], "big")
    version, layer = header >> 19 & 3, header >> 17 & 3
    kbits_at, rate_at = header >> 12 & 15, header >> 10 & 3
    if len(data) < at + 4 or header >> 21 != 0x7FF or version == 1 or layer != 1 or kbits_at in (0, 15) or rate_at == 3:
        return 0
    is_mpeg1 = version == 3
    rate = _MP3_RATES[rate_at] >> {3: 0, 2: 1, 0: 2}[version]
    return (144 if is_mpeg1 else 72) * _MP3_KBITS[is_mpeg1][kbits_at] * 1000 // rate + (header >> 9 & 1)


_CHECKS: tuple[tuple[int, bytes, Callable[[bytes], bool]], ...] = (
    (8, b"WAVE", _wav_is_cut),
    (0, b"OggS", _ogg_is_cut),
    (0, b"\x1aE\xdf\xa3", _webm_is_cut),
    (4, b"ftyp", _mp4_is_cut),
)
