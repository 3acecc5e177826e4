"""Audio and images for tests, made from nothing: good ones, and those that a hostile client sends."""

from __future__ import annotations

import io
import struct
import wave
import zlib

import numpy as np


def wav(
    samples: np.ndarray[tuple[int], np.dtype[np.float64]], rate: int = 16_000, *, width: int = 2, channels: int = 1
) -> bytes:
    """A WAV file of `samples` in [-1, 1], the same in each channel."""
    top = 2.0 ** (8 * width - 1) - 1
    values = np.repeat(np.round(samples * top).astype(np.int64), channels)
    if width == 1:
        values += 128
    data = values.astype("<i8").view(np.uint8).reshape(-1, 8)[:, :width].tobytes()
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(channels)
        writer.setsampwidth(width)
        writer.setframerate(rate)
        writer.writeframes(data)
    return file.getvalue()


def tone(
    seconds: float = 0.5, rate: int = 16_000, hertz: float = 440.0
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate)


def vowels(seconds: float, rate: int = 24_000) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Syllables of a voice: harmonics of a pitch of 120 Hz, with formants that move, four times a second."""
    at = np.arange(round(seconds * rate)) / rate
    pitch = 120.0 + 15.0 * np.sin(2 * np.pi * 3.0 * at)
    phase = 2 * np.pi * np.cumsum(pitch) / rate
    mouth = 0.5 + 0.5 * np.sin(2 * np.pi * 1.7 * at)  # from i to a
    formants = ((1.0, 300 + 400 * mouth, 80.0), (0.6, 2200 - 1000 * mouth, 110.0), (0.3, 2600 + 0 * mouth, 160.0))
    voice = np.zeros_like(at)
    for number in range(1, 40):
        gain = sum(loud / (1 + ((number * pitch - hertz) / width) ** 2) for loud, hertz, width in formants)
        voice += gain * np.sin(number * phase) / number**0.3
    voice *= 0.3 + 0.7 * np.clip(np.sin(2 * np.pi * 4 * at) + 0.5, 0, 1)
    spoken: np.ndarray[tuple[int], np.dtype[np.float64]] = 0.5 * voice / np.abs(voice).max()
    return spoken


def header(
    *, size: int = 2**32 - 1, rate: int = 16_000, channels: int = 1, bits: int = 16, code: int = 1, data: bytes = b""
) -> bytes:
    """A WAV header that says what it likes, before `data`."""
    align = max(1, channels * bits // 8)
    form = struct.pack("<HHIIHH", code, channels, rate, (rate * align) % 2**32, align % 2**16, bits)
    return (
        b"RIFF\xff\xff\xff\xffWAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", size) + data
    )


HOSTILE_CLIPS: dict[str, bytes] = {
    "empty": b"",
    "text": b"hello, this is no audio",
    "header only": header(size=0),
    "promises 4 GB, has nothing": header(),
    "cut in the header": header()[:30],
    "no channels": header(channels=0, data=bytes(64)),
    "65,535 channels": header(channels=65_535, data=bytes(64)),
    "rate 0": header(rate=0, data=bytes(64)),
    "rate 4 GHz": header(rate=2**32 - 1, data=bytes(64)),
    "0 bits": header(bits=0, data=bytes(64)),
    "64 bits": header(bits=64, data=bytes(64)),
    "unknown code": header(code=0x1234, data=bytes(64)),
    "a million empty chunks": b"RIFF\xff\xff\xff\xffWAVE" + b"junk\0\0\0\0" * 200_000,
    "a list of files to open": b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n",
    "a list of chunks that ends behind the file": wav(tone(0.01))[:12] + b"LIST\xff\xff\xff\x7f" + wav(tone(0.01))[12:],
    "hours": header(rate=4_000, bits=8, data=bytes(4_000 * 3_600)),
}


def png(
    width: int, height: int, rows: bytes | None = None, *, compressed: bytes | None = None, more: bytes = b""
) -> bytes:
    """A grey PNG. `compressed`: its IDAT as it is; `more`: chunks before it."""
    if compressed is None:
        compressed = zlib.compress((b"\0" + bytes(width)) * height if rows is None else rows)
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + more + chunk(b"IDAT", compressed) + chunk(b"IEND", b"")


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


HOSTILE_TEXTS: dict[str, bytes] = {
    "empty": b"",
    "white space only": b" \r\n\t",
    "PDF": b"%PDF-1.7\n",
    "ZIP": b"PK\x03\x04" + bytes(64),
    "program": b"\x7fELF" + bytes(64),
    "SVG": b"<?xml version='1.0'?><SVG xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></SVG>",
    "Latin-1": "Müller".encode("latin-1"),
    "a zero between letters": b"hello\0world",
    "escape codes of a terminal": b"hello \x1b[2J",
    "half a character of UTF-16": "hello".encode("utf-16")[:-1],
    "WAV": wav(tone(0.01)),
    "too long": b"a" * 70_000,
}


HOSTILE_IMAGES: dict[str, bytes] = {
    "empty": b"",
    "text": b"hello, this is no image",
    "SVG": b"<?xml version='1.0'?><svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>",
    "declares 4 gigapixels": png(65_535, 65_535, compressed=zlib.compress(b"")),
    "100 megapixels of nothing": png(10_000, 10_000, compressed=zlib.compress(bytes(10_001 * 10_000), 9)),
    "no pixels": png(0, 0),
    "pixels cut off": png(64, 64)[:-60],
    "broken compression": png(64, 64, compressed=b"\xff" * 40),
    "a text that unpacks to 64 MB": png(8, 8, more=chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(64_000_000), 9))),
    "a ZIP behind its end": png(8, 8) + b"PK\x03\x04" + bytes(64),
    "a page behind its end": png(8, 8) + b"<SCRIPT>alert(1)</SCRIPT>",
    "WAV": wav(tone(0.1)),
    "JPEG's first bytes": b"\xff\xd8\xff\xe0",
    "GIF's first bytes": b"GIF89a\xff\xff\xff\xff",
    "PDF": b"%PDF-1.7\n",
}
