"""Whether a file of sound ends before the end that its container names: cut in an upload, or while it was written.

Decoders read such a file without an error, as far as it goes. Each check walks the frames of one container and looks at
no sample; a file that does not follow its format is left to the decoder.

    WAV    RIFF: the chunk `data` has fewer bytes than it says; a recorder that never knew its length says 2 GiB or more
    Ogg    RFC 3533: the last page is incomplete, or does not end its stream
    WebM   RFC 8794: an element has fewer bytes than it says; a live recording says no length of segment and clusters
    MP4    ISO/IEC 14496-12: a box has fewer bytes than it says
    MP3    ISO/IEC 11172-3: the last frame is incomplete, or there are fewer bytes than the Xing header counts
"""

from __future__ import annotations

from collections.abc import Callable

_UNKNOWN_BYTES = 0x7FFF_0000
_MASTERS = frozenset({0x18538067, 0x1F43B675})  # WebM's segment and cluster: elements whose children are walked
_MP3_RATES = (44_100, 48_000, 32_000)
_MP3_KBITS = {  # of layer III, by whether it is MPEG-1
    True: (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    False: (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}


def is_cut_off(data: bytes) -> bool:
    """Return whether the file says that there is more of it."""
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
        element, body = _vint(data, at, keeps_marker=True)
        size, body = _vint(data, body)
        if size is None or element is None:
            return True  # within an element's header
        is_unknown = size == (1 << (7 * (body - _id_end(data, at)))) - 1
        if not is_unknown and body + size > len(data):
            return True
        at = body if element in _MASTERS else body + size
        if is_unknown and element not in _MASTERS:
            return False
    return False


def _id_end(data: bytes, at: int) -> int:
    return at + 9 - data[at].bit_length()


def _vint(data: bytes, at: int, *, keeps_marker: bool = False) -> tuple[int | None, int]:
    """Return a number of variable length and the place behind it; None if the data ends before or within it."""
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
    """Return the length of the tag before the first frame."""
    if data[:3] != b"ID3" or len(data) < 10:
        return 0
    size = 0
    for byte in data[6:10]:
        size = size << 7 | byte & 0x7F
    return 10 + size


def _xing_bytes(data: bytes, at: int) -> int:
    """Return how many bytes of frames the first frame counts; 0 if it does not say."""
    size = _mp3_frame(data, at)
    frame = data[at : at + size]
    for name in (b"Xing", b"Info"):
        if (found := frame.find(name)) >= 0:
            flags = int.from_bytes(frame[found + 4 : found + 8], "big")
            place = found + 8 + (4 if flags & 1 else 0)
            return int.from_bytes(frame[place : place + 4], "big") if flags & 2 else 0
    return 0


def _mp3_frame(data: bytes, at: int) -> int:
    """Return the length of the frame of layer III at a place, whose header is there; 0: there is none."""
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
