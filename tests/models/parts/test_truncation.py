"""Files of audio whose end is missing, and whole ones that a strict reader could take for cut."""

from __future__ import annotations

import io
import wave

import pytest

from causeway_server.models.parts.decoding.audio import decode_audio, is_cut_off
from causeway_server.models.parts.process.messages import Refusal

UNKNOWN = b"\xff\xff\xff\xff"  # of a recorder that writes to a pipe


def wav(seconds: float = 1.0) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(16_000)
        out.writeframes(b"\x00\x10" * round(16_000 * seconds))
    return file.getvalue()


@pytest.mark.parametrize("missing", [1, 2, 1000, 31_000])
def test_a_cut_wav_is_refused(missing: int) -> None:
    with pytest.raises(Refusal, match="cut off: its end is missing"):
        decode_audio(wav()[:-missing], 60.0)


def test_a_wav_of_unknown_length_is_whole() -> None:
    data = wav()
    piped = data[:4] + UNKNOWN + data[8:40] + UNKNOWN + data[44:]
    assert decode_audio(piped, 60.0).seconds == pytest.approx(1.0, abs=0.01)


def test_what_follows_a_wav_is_ignored() -> None:
    assert not is_cut_off(wav() + b"LIST\x04\x00\x00\x00INFO")


@pytest.mark.parametrize(
    "data", [b"", b"RIFF", b"ID3", b"\xff", b"\xff\xfb\x90\x00"[:3], b"OggS", b"\x1aE\xdf\xa3", b"\x00" * 8]
)
def test_rubbish_is_left_to_the_decoder_or_refused(data: bytes) -> None:
    with pytest.raises(Refusal):
        decode_audio(data, 60.0)


def ogg_page(*, last: bool, body: bytes = b"x" * 10) -> bytes:
    return b"OggS\x00" + bytes([4 if last else 0]) + bytes(20) + bytes([1, len(body)]) + body


def test_an_ogg_ends_with_its_last_page() -> None:
    whole = ogg_page(last=False) + ogg_page(last=True)
    assert not is_cut_off(whole)
    assert not is_cut_off(whole + b"TAG")
    assert is_cut_off(ogg_page(last=False))
    assert is_cut_off(whole[:-1])


def test_a_live_webm_has_no_lengths() -> None:
    """As browsers record it; a block that is cut is seen all the same."""
    block = b"\xa3\x84abcd"
    live = b"\x1aE\xdf\xa3\x80" + b"\x18S\x80g\x01" + b"\xff" * 7 + b"\x1fC\xb6u\x01" + b"\xff" * 7 + block + block
    assert not is_cut_off(live)
    assert is_cut_off(live[:-1])


def mp3_frames(count: int) -> bytes:
    return (b"\xff\xfb\x90\x00" + bytes(413)) * count  # MPEG-1, layer III, 128 kbit/s, 44.1 kHz: 417 bytes


def test_an_mp3_ends_with_a_whole_frame() -> None:
    assert not is_cut_off(mp3_frames(3))
    assert not is_cut_off(mp3_frames(3) + b"TAG" + bytes(125))
    assert is_cut_off(mp3_frames(3)[:-1])


def test_an_mp3_that_counts_its_bytes_has_as_many() -> None:
    first = b"\xff\xfb\x90\x00" + bytes(32) + b"Xing\x00\x00\x00\x02" + (417 * 3).to_bytes(4, "big")
    whole = first.ljust(417, b"\0") + mp3_frames(2)
    assert not is_cut_off(whole)
    assert is_cut_off(whole[:-417])


def test_an_mp4_has_whole_devices() -> None:
    whole = b"\x00\x00\x00\x10ftypM4A \x00\x00\x00\x00" + b"\x00\x00\x00\x0cmdatabcd"
    assert not is_cut_off(whole)
    assert is_cut_off(whole[:-1])
