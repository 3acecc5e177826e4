"""Audio in live sessions of the gateway, understood by an encoder in a real Triton; the model repeats its prompt."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import openai
import pytest

from causeway_server.cloud_pool.config import GatewaySessionConfig
from causeway_server.cloud_pool.core.request_context import FREE_BYTES
from causeway_server.cloud_pool.grpc_api.messages import InputChunk
from causeway_server.cloud_pool.http.config import GrpcConfig
from causeway_server.models.parts.process.messages import WorkerSpec
from tests.cloud_pool.conftest import triton_environment
from tests.cloud_pool.dispatch.replica import Replica
from tests.cloud_pool.grpc_api.served import chat, connected, rest
from tests.cloud_pool.grpc_api.served import text_of as output_text
from tests.models.parts.files import png, tone, wav
from tests.waiting import until

from .gateway import Gateway, running
from .peer import Event, Peer, done, text_of
from .test_edge_audio import COMPLETED, TELL, pcm, speak
from .test_edge_turns import DETECT, STARTED, STOPPED, append
from .test_edge_turns import pcm as turns

__all__ = ["triton_environment"]

pytestmark = [pytest.mark.triton, pytest.mark.slow]
WORDS = "please open|the door"
FAILED = "conversation.item.input_audio_transcription.failed"
IMAGE = "data:image/png;base64," + base64.b64encode(png(8, 8)).decode()
SHORT = GatewaySessionConfig(max_audio_s=6.0)
DIES_S, HANGS_S = 3.0, 5.0  # how long an audio clip is of which the encoder dies, or hangs


@pytest.fixture(scope="module")
def replica(triton_environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    found = Replica("a", tmp_path_factory.mktemp("replica"), encoders=True)
    try:
        found.process.ready()
        yield found
    finally:
        found.process.stop()


async def held_bytes(gateway: Gateway) -> float:
    """What of bodies and audio clips is in memory, as operators are told."""
    async with aiohttp.ClientSession() as http, http.get(f"{gateway.app.operator_url}/metrics") as reply:
        lines = (await reply.text()).splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("causeway_gateway_body_bytes "))


def seconds(length: float) -> float:
    """How much of `pcm` audio clips so long: its samples are of 16 kHz, played at 24 kHz."""
    return 1.5 * length


async def error_of(client: Peer) -> Event:
    error: Event = (await client.until("error"))[-1]["error"]
    return error


async def test_a_spoken_turn_is_heard_once_told_and_answered(replica: Replica, tmp_path: Path) -> None:
    """Also in a private session: what it remembers ends with it. Both requests are its tenant's."""
    async with running(replica, tmp_path, speech=replica.address) as gateway:
        before = replica.gauge("requests", "speech")
        async with gateway.peer(**{"x-causeway-tags": "private"}) as client:
            await client.send("session.update", session=TELL)
            await speak(client, seconds(1.0))
            await client.send("response.create")
            events = await client.until("response.done")
            assert [event["transcript"] for event in events if event["type"] == COMPLETED] == [WORDS]
            assert text_of(events) == WORDS
            assert done(events)["causeway"]["modalities"] == "audio=ok"
            assert replica.gauge("requests", "speech") - before == 1
            parts = [
                {"type": "input_text", "text": "What is this?"},
                {"type": "input_image", "image_url": IMAGE},
                {"type": "input_audio", "audio": pcm(seconds(0.5))},
            ]
            await client.send("conversation.item.create", item={"type": "message", "role": "user", "content": parts})
            await client.send("response.create")
            events = await client.until("response.done")
            assert done(events)["causeway"]["modalities"] == "audio=ok,image=ok"
            assert all(found in text_of(events) for found in ("What is this?", "TOTAL 42.00", WORDS))
            assert await held_bytes(gateway) > FREE_BYTES
            await client.close()
            await until(lambda: gateway.open_sessions == (0, 0))
            assert await held_bytes(gateway) == 0
    records = [(record["route"], record["tier"], record["outcome"]) for record in gateway.audit]
    assert records == [("transcription", "speech", "ok"), *[("realtime", "large", "ok")] * 2]


async def test_a_call_over_grpc_has_audio_clips_and_images(replica: Replica, tmp_path: Path) -> None:
    """Of an audio clip that is cut off the call's status names the part."""
    audio = wav(tone(1.0))
    chunks = [
        chat("What is this?", model="large"),
        InputChunk(image={"media_type": "image/png", "data": png(8, 8)}),
        InputChunk(audio={"format": "wav", "data": audio[:20_000]}),
        InputChunk(audio={"data": audio[20_000:]}),
    ]
    async with running(replica, tmp_path, speech=replica.address, grpc=GrpcConfig(port=0)) as gateway:
        assert gateway.app.grpc is not None
        async with connected(gateway.app.grpc.address) as client:
            call = client.call(*chunks)
            outputs = await rest(call)
            assert dict(await call.initial_metadata())["x-causeway-modalities"] == "audio=ok,image=ok"
            assert all(found in output_text(outputs) for found in ("What is this?", "TOTAL 42.00", WORDS))
            failure = await client.failure(client.call(*chunks[:2], InputChunk(audio={"format": "wav", "data": b"RI"})))
            assert "`messages[0].content[2].input_audio.data`" in failure.message
            assert await held_bytes(gateway) == 0


async def test_the_official_client_speaks_in_a_session(replica: Replica, tmp_path: Path) -> None:
    pytest.importorskip("websockets", reason="the official client's sessions need websockets")
    async with running(replica, tmp_path, speech=replica.address) as gateway:
        async with (
            openai.AsyncOpenAI(api_key="none", base_url=gateway.app.url, max_retries=0) as official,
            official.realtime.connect(model="large") as connection,
        ):
            await connection.session.update(
                session={
                    "type": "realtime",
                    "output_modalities": ["text"],
                    "audio": {"input": {"transcription": {"model": "whisper-1"}, "turn_detection": None}},
                }
            )
            await connection.input_audio_buffer.append(audio=pcm(seconds(0.7)))
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
        assert (transcript, text) == (WORDS, WORDS)


async def test_bad_audio_clips_are_told_and_the_next_good_one_is_heard(replica: Replica, tmp_path: Path) -> None:
    async with running(replica, tmp_path, speech=replica.address, realtime=SHORT) as gateway, gateway.peer() as client:
        await client.send("input_audio_buffer.append", audio="no base64!")
        assert (await error_of(client))["param"] == "audio"
        await client.send("input_audio_buffer.commit")
        assert (await error_of(client))["code"] == "input_audio_buffer_commit_empty"
        item = {"type": "message", "role": "user", "content": [{"type": "input_audio", "audio": "====" * 9}]}
        await client.send("conversation.item.create", item=item)
        assert (await error_of(client))["param"] == "item.content[0].audio"
        for _ in range(9):
            await client.send("input_audio_buffer.append", audio=pcm(seconds(1.0)))
        for _ in range(3):
            error = await error_of(client)
            assert (error["code"], "realtime.max_audio_s" in error["message"]) == ("input_audio_buffer_full", True)
        await client.send("input_audio_buffer.clear")
        turns = {"audio": {"input": {"turn_detection": {"type": "server_vad"}}}}
        await client.send("session.update", session=turns)
        assert (await error_of(client))["param"] == "session.audio.input.turn_detection"
        assert await held_bytes(gateway) == 0
        await speak(client, seconds(0.4))
        await client.send("response.create")
        assert text_of(await client.until("response.done")) == WORDS


async def test_what_a_tenants_sessions_hold_is_bounded_together(replica: Replica, tmp_path: Path) -> None:
    """More is refused until others are gone: here those of a session that ends."""
    async with (
        running(replica, tmp_path, speech=replica.address, max_body_bytes=4 * 1024 * 1024) as gateway,
        gateway.peer() as first,
        gateway.peer() as second,
        gateway.peer() as third,
    ):
        for client in (first, second, third):
            for _ in range(6):
                await client.send("input_audio_buffer.append", audio=pcm(seconds(5.0)))
        error = await error_of(third)
        assert (error["code"], "server.max_body_memory_bytes" in error["message"]) == ("rate_limit_exceeded", True)
        await first.close()
        await until(lambda: gateway.open_sessions == (2, 0))
        await third.send("input_audio_buffer.append", audio=pcm(seconds(5.0)))
        await third.send("input_audio_buffer.clear")
        assert [event["type"] for event in await third.until("input_audio_buffer.cleared")][:-1] == []
        await speak(third, seconds(0.8))
        await third.send("response.create")
        assert text_of(await third.until("response.done")) == WORDS


async def test_turns_are_detected_heard_and_answered(replica: Replica, tmp_path: Path) -> None:
    """While the detector is dead that is told, and the audio is kept."""
    there = tmp_path / "there"
    detector = WorkerSpec("tests.models.parts.workers:LoudnessDetector", options={"fault": "die", "until": str(there)})
    async with (
        running(replica, tmp_path, speech=replica.address, speech_detector=detector) as gateway,
        gateway.peer() as client,
    ):
        await client.send("session.update", session=DETECT)
        await append(client, turns(True))
        error = await error_of(client)
        assert (error["code"], "Speech turns cannot be detected now" in error["message"]) == ("encoder_failed", True)
        there.touch()
        await append(client, turns(True, False))
        events = await client.until("response.done")
        kinds = [event["type"] for event in events]
        order = [STARTED, STOPPED, "input_audio_buffer.committed", "response.created", COMPLETED]
        assert [kind for kind in kinds if kind in order] == order
        assert text_of(events) == WORDS


async def test_an_encoder_that_dies_or_is_away_fails_its_turn_and_the_session_goes_on(
    replica: Replica, tmp_path: Path
) -> None:
    async with running(replica, tmp_path, speech=replica.address) as gateway, gateway.peer() as client:
        await client.send("session.update", session=TELL)
        await speak(client, seconds(DIES_S))
        await client.send("response.create")
        events = await client.until("response.done")
        failed = [event for event in events if event["type"] == FAILED]
        assert [event["error"]["code"] for event in failed] == ["encoder_failed"]
        assert done(events)["status_details"]["error"]["code"] == "encoder_failed"
        await client.send("conversation.item.delete", item_id=failed[0]["item_id"])
        await speak(client, seconds(0.6))
        await client.send("response.create")
        assert text_of(await client.until("response.done")) == WORDS
    (tmp_path / "away").mkdir()
    async with running(replica, tmp_path / "away", speech="127.0.0.1:1") as gateway, gateway.peer() as client:
        await client.send("session.update", session=TELL)
        await speak(client, seconds(0.6))
        assert (await client.until(FAILED))[-1]["error"]["message"]
        await client.send("response.create")
        assert done(await client.until("response.done"))["status_details"]["error"]["code"] == "encoder_failed"


async def test_an_audio_clip_is_heard_while_its_client_is_away(replica: Replica, tmp_path: Path) -> None:
    async with running(replica, tmp_path, speech=replica.address) as gateway, gateway.peer() as first:
        await first.send("session.update", session=TELL)
        await speak(first, seconds(HANGS_S))
        await first.send("response.create")
        await first.until("response.created")
        await until(lambda: replica.gauge("running", "speech") == 1)
        first.cut()
        await until(lambda: gateway.open_sessions == (0, 1))
        replica.encode.touch()
        try:
            async with gateway.peer(f"session_id={first.session_id}&after={first.last}") as second:
                events = await second.until("response.done")
        finally:
            replica.encode.unlink()
        assert [event["transcript"] for event in events if event["type"] == COMPLETED] == [WORDS]
        assert text_of(events) == WORDS


async def test_the_work_for_a_client_that_leaves_while_it_is_heard_ends(replica: Replica, tmp_path: Path) -> None:
    async with running(replica, tmp_path, speech=replica.address) as gateway, gateway.peer() as client:
        await client.send("session.update", session=TELL)
        await speak(client, seconds(HANGS_S))
        await until(lambda: replica.gauge("running", "speech") == 1)
        await client.close()
        await until(lambda: replica.gauge("running", "speech") == 0)


async def test_a_session_that_may_send_no_audio_says_why(replica: Replica, tmp_path: Path) -> None:
    tokens = "kiosk kiosk-secret modalities=text\n"
    headers = {"Authorization": "Bearer kiosk-secret"}
    for speech, why in ((replica.address, "This token may not send audio. It allows only text."), ("", "can: [audio]")):
        async with (
            running(replica, tmp_path, tokens=tokens if speech else "", speech=speech) as gateway,
            gateway.peer(**headers) as client,
        ):
            assert "audio" not in client.events[0]["session"]
            await client.send("input_audio_buffer.append", audio=pcm(0.2))
            error = await error_of(client)
            assert (error["code"], why in error["message"]) == ("unsupported_feature", True)
