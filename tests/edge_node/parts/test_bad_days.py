"""Bad days of audio and images on a whole daemon: odd and hostile files, little memory, dead and hung processes."""

from __future__ import annotations

import asyncio
import collections
import signal
from pathlib import Path

import numpy as np
import pytest

from causeway_server.edge_node.clock import Clock
from causeway_server.models.parts.process.messages import WorkerSpec
from causeway_server.router.bundle.settings import PartsConfig
from causeway_server.router.types import Modality
from tests.jumping_loop import JumpingLoop, run_jumping
from tests.models.parts.files import HOSTILE_CLIPS, HOSTILE_IMAGES, header, png, tone, wav
from tests.models.parts.test_decoding import WAIT_S, needs_pillow
from tests.models.parts.worker_processes import worker_processes
from tests.waiting import until

from ..device import POLICY, Device, running
from .test_fusion import BOTH, COMMAND, PATIENT, SILENCE, ask, audio, encoder, image, prompt, text

pytestmark = pytest.mark.slow

ROOMY = POLICY.replace("concurrent: 4", "concurrent: 16")
ODD_CLIPS = {
    "8 bits": wav(tone(0.2), width=1),
    "24 bits in stereo": wav(tone(0.2, 44_100), 44_100, width=3, channels=2),
    "a telephone's rate": wav(tone(0.2, 8_000), 8_000),
    "a studio's rate": wav(tone(0.2, 192_000), 192_000, width=4),
    "a header that promises 4 GB": header(data=wav(tone(0.2))[44:]),
    "half a sample too much": wav(tone(0.2)) + b"\0",
}


async def test_odd_audio_clips_are_heard_and_hostile_ones_refused_by_name(tmp_path: Path) -> None:
    async with running(tmp_path, encoders={"audio": encoder(COMMAND)}, parts=PATIENT) as device:
        for name, data in ODD_CLIPS.items():
            assert (await ask(device, audio(data))).status == 200, name
            assert prompt(device.engine).content == COMMAND, name
        hostile = {name: data for name, data in HOSTILE_CLIPS.items() if name != "hours"}  # larger than a body may be
        for name, data in {**hostile, "silence": SILENCE}.items():
            answer = await ask(device, audio(data))
            assert answer.status == 400, name
            assert "messages[0].content[0].input_audio.data" in answer.message, name
            assert "Send" in answer.message, name
        assert (await ask(device, audio(wav(tone(0.3))))).status == 200
        device.assert_nothing_leaks()


async def test_ten_audio_clips_at_once_with_little_memory_are_each_answered_or_refused(tmp_path: Path) -> None:
    """The large ones need more than the decoder may have; the others and the daemon do not notice."""
    little = PartsConfig(decoder_memory_bytes=160 * 1024 * 1024, audio_timeout_s=WAIT_S, max_audio_s=600.0)
    large = wav(np.zeros(5_000_000), 16_001, width=1)  # 320 MB while it is resampled
    async with running(tmp_path, policy=ROOMY, encoders={"audio": encoder(COMMAND)}, parts=little) as device:
        clips = [large if at % 2 else wav(tone(0.2 + at / 100)) for at in range(10)]
        answers = await asyncio.gather(*(ask(device, text("hello"), audio(data)) for data in clips))
        assert collections.Counter(answer.status for answer in answers) == {200: 5, 400: 5}
        assert {"more memory" in answer.message for answer in answers if answer.status == 400} == {True}
        assert (await ask(device, audio())).status == 200
        device.assert_nothing_leaks()


@needs_pillow
async def test_ten_images_at_once_with_little_memory_are_each_answered_or_refused(tmp_path: Path) -> None:
    little = PartsConfig(decoder_memory_bytes=128 * 1024 * 1024, image_timeout_s=WAIT_S, max_pixels=1_000_000_000)
    large = HOSTILE_IMAGES["100 megapixels of nothing"]  # 300 MB as pixels
    async with running(tmp_path, policy=ROOMY, encoders=BOTH, parts=little) as device:
        images = [large if at % 2 else png(32 + at, 16) for at in range(10)]
        answers = await asyncio.gather(*(ask(device, text("hello"), image(data)) for data in images))
        assert collections.Counter(answer.status for answer in answers) == {200: 5, 400: 5}
        assert {"more memory" in answer.message for answer in answers if answer.status == 400} == {True}
        assert (await ask(device, text("hello"), image())).headers["x-causeway-modalities"] == "image=ok"
        device.assert_nothing_leaks()


async def test_an_encoder_that_is_killed_in_a_request_costs_its_fact_and_no_later_one(tmp_path: Path) -> None:
    awake = tmp_path / "awake"
    options = {"text": COMMAND, "fault": "hang", "until": str(awake)}
    spec = WorkerSpec("tests.models.parts.workers:TinyEncoder", options=options)
    async with running(tmp_path / "device", encoders={"audio": spec}, parts=PATIENT) as device:
        asking = asyncio.create_task(ask(device, text("hello"), audio()))
        await until(lambda: len(worker_processes()) == 2, WAIT_S)  # the decoder is done, the encoder works
        for child in worker_processes():
            child.kill()
        answer = await asking
        assert (answer.status, answer.headers["x-causeway-modalities"]) == (200, "audio=failed")
        await until(lambda: not worker_processes(), WAIT_S)  # a busy machine ends the decoder a moment after the signal
        awake.touch()
        again = await ask(device, audio())
        assert (again.status, again.headers["x-causeway-modalities"]) == (200, "audio=ok")
        device.assert_nothing_leaks()


@needs_pillow
async def test_hostile_images_are_refused_by_name_and_the_next_good_one_is_read(tmp_path: Path) -> None:
    async with running(tmp_path, encoders=BOTH, parts=PATIENT) as device:
        for name, data in HOSTILE_IMAGES.items():
            answer = await ask(device, text("hello"), image(data))
            assert answer.status == 400, name
            assert "messages[0].content[1].image_url.url" in answer.message, name
        assert (await ask(device, text("hello"), image())).headers["x-causeway-modalities"] == "image=ok"
        assert await metric(device, 'encoder_process_starts_total{part="image"}') == 2  # none of them took a process
        device.assert_nothing_leaks()


def test_a_decoder_that_hangs_costs_its_part_and_no_later_one(tmp_path: Path) -> None:
    async def hang(loop: JumpingLoop) -> None:
        encoders: dict[Modality, WorkerSpec] = {"audio": encoder(COMMAND)}
        async with running(tmp_path, encoders=encoders, clock=Clock(monotonic=loop.time)) as device:
            assert await metric(device, 'encoder_processes{part="audio"}') == 0
            assert (await ask(device, audio())).status == 200
            decoder = min(worker_processes(), key=lambda child: child.create_time())
            decoder.send_signal(signal.SIGSTOP)
            asking = asyncio.create_task(ask(device, text("hello"), audio(wav(tone(0.3)))))
            await until(lambda: running_parts(device) > 0, WAIT_S)
            loop.jump(PartsConfig().audio_timeout_s)
            answer = await asking
            assert (answer.status, answer.headers["x-causeway-modalities"]) == (200, "audio=timeout")
            again = await ask(device, audio(wav(tone(0.3))))
            assert (again.status, again.headers["x-causeway-modalities"]) == (200, "audio=ok")
            assert not decoder.is_running()
            assert await metric(device, 'encoder_processes{part="audio"}') == 2
            assert await metric(device, 'encoder_process_starts_total{part="audio"}') == 3
            assert await metric(device, "parts_in_progress") == 0
            device.assert_nothing_leaks()

    run_jumping(hang)


def running_parts(device: Device) -> int:
    assert device.parts.encoders is not None
    return device.parts.encoders.graph.running


async def metric(device: Device, name: str) -> float:
    lines = (await device.get("/metrics")).body.decode().splitlines()
    (value,) = [line.rpartition(" ")[2] for line in lines if line.startswith(f"causeway_edge_{name} ")]
    return float(value)
