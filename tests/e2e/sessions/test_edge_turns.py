"""Turns that a real daemon detects in what a client sends: a real child says where it is loud, which is speech here."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import openai
import pytest
from openai.types.realtime import RealtimeSessionCreateRequestParam

from causeway_server.models.parts.process.messages import WorkerSpec
from causeway_server.router.bundle.settings import RealtimeConfig
from tests.edge_node.device import Device, running
from tests.edge_node.parts.test_fusion import COMMAND, PATIENT
from tests.edge_node.scripted import EDGE_WORDS
from tests.models.parts.files import vowels

from .peer import Event, Peer, done, text_of
from .test_edge_audio import COMPLETED

pytestmark = pytest.mark.slow
VAD: Event = {"type": "server_vad", "silence_duration_ms": 200, "prefix_padding_ms": 100}
DETECT: Event = {"audio": {"input": {"turn_detection": VAD, "transcription": {"model": "speech"}}}}
STARTED, STOPPED = "input_audio_buffer.speech_started", "input_audio_buffer.speech_stopped"


def pcm(*spoken: bool) -> str:
    """Half seconds of speech and silence."""
    samples = np.concatenate([vowels(0.5) if speaks else np.zeros(12_000) for speaks in spoken])
    return base64.b64encode(np.round(samples * 32_000).astype("<i2").tobytes()).decode()


@asynccontextmanager
async def detecting(tmp_path: Path, **options: str) -> AsyncIterator[tuple[Device, Peer]]:
    encoder = WorkerSpec("tests.models.parts.workers:TinyEncoder", options={"text": COMMAND})
    detector = WorkerSpec("tests.models.parts.workers:LoudnessDetector", options=options)
    realtime = RealtimeConfig(max_audio_s=5.0)
    async with running(
        tmp_path / "device", encoders={"audio": encoder}, speech_detector=detector, parts=PATIENT, realtime=realtime
    ) as device:
        client = await Peer.connect(device.app.port)
        try:
            await client.event()
            await client.send("session.update", session=DETECT)
            await client.until("session.updated")
            yield device, client
        finally:
            client.cut()


async def append(client: Peer, audio: str) -> None:
    for at in range(0, len(audio), 8000):
        await client.send("input_audio_buffer.append", audio=audio[at : at + 8000])


async def test_a_spoken_turn_is_noticed_heard_and_answered_and_the_next_one_too(tmp_path: Path) -> None:
    async with detecting(tmp_path) as (device, client):
        for _ in range(2):
            await append(client, pcm(False, True, False))
            events = await client.until("response.done")
            kinds = [event["type"] for event in events]
            order = [STARTED, STOPPED, "input_audio_buffer.committed", "response.created", COMPLETED]
            assert [kind for kind in kinds if kind in order] == order
            assert text_of(events) == "".join(EDGE_WORDS)
            assert len({event["item_id"] for event in events if event["type"] in (STARTED, STOPPED, COMPLETED)}) == 1
        assert [message.content for message in device.engine.calls[-1].request.messages][::2] == [COMMAND, COMMAND]
        device.assert_nothing_leaks()


async def test_speech_interrupts_the_answer_and_is_answered(tmp_path: Path) -> None:
    async with detecting(tmp_path) as (device, client):
        device.engine.fault = "stall"
        await append(client, pcm(True, False))
        await client.until("response.created")
        device.engine.fault = "none"
        await append(client, pcm(True))
        stopped = await client.until("response.done")
        assert done(stopped)["status_details"] == {"type": "cancelled", "reason": "turn_detected"}
        await append(client, pcm(False))
        assert done(await client.until("response.done"))["status"] == "completed"
        device.assert_nothing_leaks()


async def test_a_detector_that_dies_is_told_and_what_was_sent_is_looked_through_by_the_next_one(tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    async with detecting(tmp_path, fault="die", until=str(alive)) as (device, client):
        await client.send("input_audio_buffer.append", audio=pcm(True))
        (error,) = [event for event in await client.until("error") if event["type"] == "error"]
        assert error["error"]["code"] == "encoder_failed"
        alive.touch()
        await append(client, pcm(False))
        events = await client.until("response.done")
        assert [event["type"] for event in events][:2] == [STARTED, STOPPED]
        assert events[0]["audio_start_ms"] == 0
        device.assert_nothing_leaks()


async def test_the_official_client_has_its_turns_detected(tmp_path: Path) -> None:
    pytest.importorskip("websockets", reason="the official client's sessions need websockets")
    settings: RealtimeSessionCreateRequestParam = {
        "type": "realtime",
        "output_modalities": ["text"],
        "audio": {
            "input": {
                "transcription": {"model": "whisper-1"},
                "turn_detection": {
                    "type": "server_vad",
                    "threshold": 0.6,
                    "prefix_padding_ms": 300,
                    "silence_duration_ms": 300,
                    "create_response": True,
                    "interrupt_response": True,
                },
            }
        },
    }
    async with detecting(tmp_path) as (device, _):
        base_url = f"http://127.0.0.1:{device.app.port}/v1"
        async with (
            openai.AsyncOpenAI(api_key="none", base_url=base_url, max_retries=0) as official,
            official.realtime.connect(model="auto") as connection,
        ):
            await connection.session.update(session=settings)
            await connection.input_audio_buffer.append(audio=pcm(False, True, False))
            told: list[int] = []
            transcript = ""
            async for event in connection:
                if event.type == "input_audio_buffer.speech_started":
                    told.append(event.audio_start_ms)
                elif event.type == "input_audio_buffer.speech_stopped":
                    told.append(event.audio_end_ms)
                elif event.type == "conversation.item.input_audio_transcription.completed":
                    transcript = event.transcript
                elif event.type == "response.done":
                    break
        start, end = told
        assert 100 <= start <= 500 < 1000 <= end <= 1500
        assert transcript == COMMAND
