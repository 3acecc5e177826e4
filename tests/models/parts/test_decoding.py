"""The decoders in their child: what they make of good files, and what hostile ones cannot do."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator

import numpy as np
import pytest

from causeway_server.models.parts.process.messages import (
    AudioSamples,
    Decode,
    ImagePixels,
    ImageSize,
    MeasureImage,
    PartLimits,
    Refusal,
    WorkerSpec,
)
from causeway_server.models.parts.process.parent import WorkerProcess

from .files import HOSTILE_CLIPS, HOSTILE_IMAGES, header, png, tone, wav

pytestmark = pytest.mark.slow

WAIT_S = 60.0
LIMITS = PartLimits(audio_s=60.0, pixels=4_000_000, side=256)
needs_pillow = pytest.mark.skipif(
    __import__("importlib.util").util.find_spec("PIL") is None, reason="Pillow is not installed (extra images)"
)


@pytest.fixture
async def decoder() -> AsyncIterator[WorkerProcess]:
    worker = WorkerProcess(
        WorkerSpec("causeway_server.models.parts.decoding.decoder:PartDecoder", LIMITS, memory_bytes=256 * 1024 * 1024)
    )
    yield worker
    await worker.close()


def soon() -> float:
    return asyncio.get_running_loop().time() + WAIT_S


async def audio(decoder: WorkerProcess, data: bytes) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    result = await decoder.run(Decode("audio", data), soon())
    assert isinstance(result, AudioSamples)
    return np.frombuffer(result.samples, "<f4")


async def image(decoder: WorkerProcess, data: bytes) -> np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]:
    result = await decoder.run(Decode("image", data), soon())
    assert isinstance(result, ImagePixels)
    return np.frombuffer(result.pixels, np.uint8).reshape(result.height, result.width, 3)


@pytest.mark.parametrize("rate", [8_000, 16_000, 22_050, 44_100, 48_000])
async def test_any_rate_width_and_number_of_channels_becomes_the_same_tone(decoder: WorkerProcess, rate: int) -> None:
    for width, channels in ((1, 1), (2, 2), (3, 1), (4, 2)):
        samples = await audio(decoder, wav(tone(0.5, rate), rate, width=width, channels=channels))
        assert abs(samples.size - 8_000) <= 2
        spectrum = np.abs(np.fft.rfft(samples))
        assert abs(int(spectrum.argmax()) - 220) <= 1  # 440 Hz in half a second
        assert 0.4 < np.abs(samples[100:-100]).max() < 0.6


async def test_an_audio_clip_above_the_new_rate_is_filtered_out_and_does_not_turn_up_elsewhere(
    decoder: WorkerProcess,
) -> None:
    samples = await audio(decoder, wav(tone(0.5, 48_000, hertz=15_000.0), 48_000))
    assert np.abs(samples[100:-100]).max() < 0.02


async def test_silence_and_a_header_that_promises_more_than_there_is_are_what_they_are(decoder: WorkerProcess) -> None:
    assert not (await audio(decoder, wav(np.zeros(1600)))).any()
    assert (await audio(decoder, header(data=wav(tone(0.1))[44:]))).size == 1600
    assert (await audio(decoder, header(data=bytes(3201)))).size == 1600  # half a sample at the end


async def test_hostile_audio_clips_are_refused_and_the_next_good_one_is_decoded(decoder: WorkerProcess) -> None:
    for name, data in HOSTILE_CLIPS.items():
        with pytest.raises(Refusal) as refusal:
            await decoder.run(Decode("audio", data), soon())
        assert "Send" in str(refusal.value), name  # what to do instead
        assert "Error" not in str(refusal.value), name
        assert (await audio(decoder, wav(tone(0.1)))).size == 1600, name
    assert decoder.starts == 1  # none of them took the child


@needs_pillow
async def test_an_image_is_turned_scaled_and_loses_its_metadata(decoder: WorkerProcess) -> None:
    from PIL import Image

    photo = Image.new("RGB", (600, 300), "red")
    photo.paste("blue", (0, 0, 300, 300))  # the left half
    exif = Image.Exif()
    exif[0x0112] = 6  # turn it clockwise
    exif[0x010E] = "secret"
    file = io.BytesIO()
    photo.save(file, "JPEG", exif=exif)
    pixels = await image(decoder, file.getvalue())
    assert pixels.shape == (256, 128, 3)
    assert pixels[10, 60, 2] > 200  # blue is above
    assert pixels[-10, 60, 0] > 200
    assert b"secret" not in pixels.tobytes()


@needs_pillow
async def test_transparent_grey_and_single_frame_images_become_rgb_on_white(decoder: WorkerProcess) -> None:
    from PIL import Image

    for kind, mode in (("PNG", "RGBA"), ("WEBP", "RGBA"), ("GIF", "P"), ("PNG", "L")):
        file = io.BytesIO()
        Image.new(mode, (8, 4), 0).save(file, kind, **({"transparency": 0} if mode == "P" else {}))
        pixels = await image(decoder, file.getvalue())
        assert pixels.shape == (4, 8, 3)
        assert (pixels == (0 if mode == "L" else 255)).all(), kind


@needs_pillow
async def test_hostile_images_are_refused_and_the_next_good_one_is_decoded(decoder: WorkerProcess) -> None:
    from PIL import Image

    moving = io.BytesIO()
    Image.new("L", (8, 8)).save(moving, "GIF", save_all=True, append_images=[Image.new("L", (8, 8), 255)])
    whole = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(whole, "JPEG")
    broken = {**HOSTILE_IMAGES, "animated": moving.getvalue(), "a JPEG cut off": whole.getvalue()[:-400]}
    for name, data in broken.items():
        with pytest.raises(Refusal) as refusal:
            await decoder.run(Decode("image", data), soon())
        assert "Send" in str(refusal.value) or "Save" in str(refusal.value), name
        assert "Error" not in str(refusal.value), name
        assert (await image(decoder, png(8, 4))).shape == (4, 8, 3), name
    assert decoder.starts == 1


@needs_pillow
async def test_an_image_is_measured_by_what_its_file_declares_without_its_pixels(decoder: WorkerProcess) -> None:
    assert await decoder.run(MeasureImage(png(640, 480, compressed=b"")), soon()) == ImageSize(640, 480)
    with pytest.raises(Refusal, match="megapixels"):
        await decoder.run(MeasureImage(HOSTILE_IMAGES["declares 4 gigapixels"]), soon())


@needs_pillow
async def test_an_image_that_needs_more_memory_than_the_child_has_is_refused() -> None:
    big = PartLimits(pixels=1_000_000_000)
    worker = WorkerProcess(
        WorkerSpec("causeway_server.models.parts.decoding.decoder:PartDecoder", big, memory_bytes=128 * 1024 * 1024)
    )
    try:
        with pytest.raises(Refusal, match="memory"):
            await worker.run(Decode("image", HOSTILE_IMAGES["100 megapixels of nothing"]), soon())
        assert (await image(worker, png(8, 4))).shape == (4, 8, 3)
    finally:
        await worker.close()
