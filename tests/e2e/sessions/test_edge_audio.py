"""Audio in live sessions of a real daemon: a real decoder, a tiny encoder, and the official client."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import openai
import pytest

from causeway_server.models.parts.process.messages import WorkerSpec
from causeway_server.router.bundle.settings import RealtimeConfig
from causeway_server.router.types import Modality
from tests.edge_node.device import Device, running
from tests.edge_node.parts.test_audio_api import RATE, install_voices
from tests.edge_node.parts.test_fusion import COMMAND, PATIENT, prompt
from tests.edge_node.scripted import EDGE_WORDS
from tests.models.parts.files import tone
from tests.waiting import until

from .peer import Peer, done, text_of

pytestmark = pytest.mark.slow
TELL = {"audio": {"input": {"transcription": {"model": "speech"}}}}
DELTA = "conversation.item.input_audio_transcription.delta"
COMPLETED = "conversation.item.input_audio_transcription.completed"


def pcm(seconds: float) -> str:
    samples = np.round(tone(seconds) * 20_000).astype("<i2")  # of 16 kHz, played a little faster
    return base64.b64encode(samples.tobytes()).decode()


@asynccontextmanager
async def listening(
    tmp_path: Path, encoder: dict[str, str] | None, environ: Mapping[str, str] = {}
) -> AsyncIterator[tuple[Device, Peer]]:
    """A daemon and a session of it. `encoder`: None: the daemon has none."""
    spec = WorkerSpec("tests.models.parts.workers:TinyEncoder", options={"text": COMMAND, **(encoder or {})})
    encoders: dict[Modality, WorkerSpec] = {} if encoder is None else {"audio": spec}
    realtime = RealtimeConfig(max_audio_s=5.0)
    async with running(
        tmp_path / "device", encoders=encoders, parts=PATIENT, realtime=realtime, environ=environ
    ) as device:
        client = await Peer.connect(device.app.port)
        try:
            await client.event()
            yield device, client
        finally:
            client.cut()


async def speak(client: Peer, seconds: float = 1.0) -> None:
    whole = pcm(seconds)
    for at in range(0, len(whole), 8000):
        await client.send("input_audio_buffer.append", audio=whole[at : at + 8000])
    await client.send("input_audio_buffer.commit")


async def test_a_spoken_turn_is_heard_once_told_and_answered_as_a_typed_one(tmp_path: Path) -> None:
    async with listening(tmp_path, {}) as (device, client):
        await client.send("session.update", session=TELL)
        await speak(client)
        await client.send("response.create")
        events = await client.until("response.done")
        told = [event["transcript"] for event in events if event["type"] == COMPLETED]
        assert told == [COMMAND]
        assert text_of(events) == "".join(EDGE_WORDS)
        assert prompt(device.engine).content == COMMAND
        record = device.newest()
        assert done(events)["causeway"]["decision"] == record.id
        (part,) = record.parts
        assert (part.modality, part.status, part.cached) == ("audio", "ok", True)
        await speak(client, 0.5)
        await client.send("response.create")
        await client.until("response.done")
        assert [message.content for message in device.engine.calls[-1].request.messages][::2] == [COMMAND, COMMAND]
        device.assert_nothing_leaks()


async def test_what_is_certain_is_told_while_somebody_speaks_and_nothing_of_it_is_remembered(tmp_path: Path) -> None:
    async with listening(tmp_path, {}) as (device, client):
        assert device.app.parts.encoders is not None
        graph = device.app.parts.encoders.graph
        await client.send("session.update", session=TELL)
        for _ in range(2):
            await client.send("input_audio_buffer.append", audio=pcm(2.0))
            await client.send("conversation.item.retrieve", item_id="none")  # the audio before it has arrived
            await client.until("error")
            await until(lambda: not graph.running)
        (delta,) = [event for event in await client.until(DELTA) if event["type"] == DELTA]
        assert delta["delta"] == COMMAND
        await client.send("input_audio_buffer.commit")
        told = (await client.until(COMPLETED))[-1]
        assert (told["transcript"], told["item_id"]) == (COMMAND, delta["item_id"])
        (part,) = device.newest().parts
        assert not part.cached
        device.assert_nothing_leaks()


async def test_partial_transcripts_are_skipped_while_one_is_being_made(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    async with listening(tmp_path, {"fault": "hang", "until": str(gate)}) as (device, client):
        assert device.app.parts.encoders is not None
        await client.send("session.update", session=TELL)
        for _ in range(3):
            await client.send("input_audio_buffer.append", audio=pcm(2.0))
            await client.send("conversation.item.retrieve", item_id="none")
            await client.until("error")
            assert device.app.parts.encoders.graph.running == 1
        await client.send("input_audio_buffer.commit")
        await client.until("conversation.item.done")
        gate.touch()
        events = await client.until(COMPLETED)
        assert DELTA not in [event["type"] for event in events]
        device.assert_nothing_leaks()


async def test_a_response_is_cancelled_while_its_audio_is_being_understood(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    async with listening(tmp_path, {"fault": "hang", "until": str(gate)}) as (device, client):
        await client.send("session.update", session=TELL)
        await speak(client)
        await client.send("response.create")
        await client.until("response.created")
        await client.send("response.cancel")
        assert done(await client.until("response.done"))["status"] == "cancelled"
        assert device.engine.calls == []
        gate.touch()
        assert (await client.until(COMPLETED))[-1]["transcript"] == COMMAND
        await client.send("response.create")
        assert done(await client.until("response.done"))["status"] == "completed"
        device.assert_nothing_leaks()


async def test_an_audio_clip_that_cannot_be_read_fails_its_response_and_the_session_goes_on(tmp_path: Path) -> None:
    async with listening(tmp_path, {"fault": "die"}) as (device, client):
        await client.send("session.update", session=TELL)
        await speak(client)
        await client.send("response.create")
        events = await client.until("response.done")
        failed = [event for event in events if event["type"].endswith("transcription.failed")]
        assert [event["error"]["code"] for event in failed] == ["encoder_failed"]
        assert done(events)["status_details"]["error"]["code"] == "all_attempts_failed"
        await client.send("conversation.item.delete", item_id=failed[0]["item_id"])
        assert done(await client.ask())["status"] == "completed"
        device.assert_nothing_leaks()


async def test_a_device_without_an_encoder_says_what_to_install(tmp_path: Path) -> None:
    async with listening(tmp_path, None) as (_, client):
        await client.send("input_audio_buffer.append", audio=pcm(0.2))
        refused = (await client.event())["error"]
        assert refused["code"] == "unsupported_feature"
        assert "pip install 'causeway-router[voice]'" in refused["message"]
        assert done(await client.ask())["status"] == "completed"


async def test_an_answer_is_spoken_and_an_unknown_voice_fails_it(tmp_path: Path) -> None:
    environ = {"PATH": str(install_voices(tmp_path))}
    async with listening(tmp_path, {}, environ) as (device, client):
        update = {"output_modalities": ["audio"], "audio": {"output": {"voice": "en-us"}}}
        await client.send("session.update", session=update)
        await speak(client)
        await client.send("response.create")
        events = await client.until("response.done")
        spoken = b"".join(
            base64.b64decode(event["delta"]) for event in events if event["type"] == "response.output_audio.delta"
        )
        # 100 samples a character at 22,050 Hz, become 24 kHz.
        assert len(spoken) // 2 == pytest.approx(100 * len("".join(EDGE_WORDS)) * 24_000 / RATE, rel=0.02)
        assert done(events)["output"][0]["content"] == [{"type": "output_audio", "transcript": "".join(EDGE_WORDS)}]
        await client.send("session.update", session={"audio": {"output": {"voice": "alloy"}}})
        error = done(await client.ask())["status_details"]["error"]
        assert error["param"] == "voice"
        device.assert_nothing_leaks()


async def test_the_official_client_speaks_in_a_session(tmp_path: Path) -> None:
    pytest.importorskip("websockets", reason="the official client's sessions need websockets")
    async with listening(tmp_path, {}) as (device, _):
        base_url = f"http://127.0.0.1:{device.app.port}/v1"
        async with (
            openai.AsyncOpenAI(api_key="none", base_url=base_url, max_retries=0) as official,
            official.realtime.connect(model="auto") as connection,
        ):
            await connection.session.update(
                session={
                    "type": "realtime",
                    "output_modalities": ["text"],
                    "audio": {
                        "input": {
                            "format": {"type": "audio/pcm", "rate": 24_000},
                            "transcription": {"model": "whisper-1"},
                            "turn_detection": None,
                        }
                    },
                }
            )
            await connection.input_audio_buffer.append(audio=pcm(1.0))
            await connection.input_audio_buffer.commit()
            await connection.response.create()
            text, transcript = "", ""
            async for event in connection:
                if event.type == "response.output_text.delta":
                    text += event.delta
                elif event.type == "conversation.item.input_audio_transcription.completed":
                    transcript = event.transcript
                elif event.type == "response.done":
                    break
        assert (transcript, text) == (COMMAND, "".join(EDGE_WORDS))
