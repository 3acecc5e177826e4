"""`/v1/audio/*` on a real daemon, by the official client: a real decoder, a tiny encoder, a scripted espeak-ng."""

from __future__ import annotations

import asyncio
import contextlib
import io
import sys
import wave
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import openai
import psutil
import pytest

from causeway_server.edge_node.config.schema import ServerConfig
from causeway_server.edge_node.parts.speaker import Speaker
from causeway_server.models.parts.graph.graph import transcript_of
from causeway_server.models.parts.installed import PROGRAM
from causeway_server.models.parts.process.messages import Found, Segment, Word, WorkerSpec
from causeway_server.router.bundle.settings import PartsConfig
from causeway_server.router.checks.what_if import what_if
from causeway_server.router.errors import EncoderFailed
from causeway_server.router.types import DecisionRecord, Fact, Modality
from tests.jumping_loop import JumpingLoop, run_jumping
from tests.models.parts.files import HOSTILE_CLIPS
from tests.models.parts.test_decoding import WAIT_S
from tests.models.parts.worker_processes import worker_processes
from tests.waiting import until

from ..device import POLICY, Answer, Device, running
from .test_fusion import COMMAND, PATIENT, SILENCE, SPEECH, ask, audio, encoder, text

pytestmark = pytest.mark.slow
RATE = 22_050
MAX_BODY_BYTES = ServerConfig().max_body_bytes
SAID = "SECRET words"
SCRIPT = '''#!{python} -S
"""Lists two voices; speaks 100 samples a character. Some texts fail, flood or hang."""
import os, struct, sys, time

if "--voices" in sys.argv:
    print("Pty Language Age/Gender VoiceName File Other")
    print(" 5  de        --/M     German    gmw/de")
    print(" 2  en-us     --/M     English_(America) gmw/en-US (en 3)")
    sys.exit()
text = sys.stdin.buffer.read()
with open(os.path.join(os.path.dirname(sys.argv[0]), "spoken"), "a") as file:
    file.write(f"{{os.getpid()}} {{' '.join(sys.argv[1:])}}\\n")
if b"fail" in text:
    sys.exit(3)
if b"hang" in text:
    time.sleep(3600)
if "--ipa" in sys.argv:  # its letters are its phonemes
    sys.stdout.buffer.write(text.lower().strip(b" .?!,;:"))
    sys.exit()
form = struct.pack("<IHHIIHH", 16, 1, 1, {rate}, 2 * {rate}, 2, 16)
head = b"RIFF$\\xf0\\xff\\x7fWAVEfmt " + form + b"data\\x00\\xf0\\xff\\x7f"
sys.stdout.buffer.write(head + b"\\x01\\x20" * (100 * len(text)))
'''


@pytest.fixture
def voices(tmp_path: Path) -> Path:
    return install_voices(tmp_path)


def install_voices(tmp_path: Path) -> Path:
    """The folder of a program that speaks."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / PROGRAM
    program.write_text(SCRIPT.format(python=sys.executable, rate=RATE))
    program.chmod(0o755)
    return folder


@contextlib.asynccontextmanager
async def talking(
    tmp_path: Path, voices: Path | None = None, fault: str = "", policy: str = POLICY
) -> AsyncIterator[Device]:
    environ = {} if voices is None else {"PATH": str(voices)}
    encoders: dict[Modality, WorkerSpec] = {"audio": encoder(COMMAND, fault)}
    async with running(tmp_path / "device", policy=policy, encoders=encoders, environ=environ) as device:
        yield device


def client(device: Device) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(api_key="none", base_url=f"http://127.0.0.1:{device.app.port}/v1", max_retries=0)


async def send(device: Device, path: str, data: Any = None, headers: Mapping[str, str] = {}, **json: Any) -> Answer:
    async with device.session.post(f"/v1/audio/{path}", headers=headers, data=data, json=json or None) as reply:
        return Answer(reply.status, dict(reply.headers), await reply.read())


def form(file: bytes = SPEECH, model: str = "auto", more: Mapping[str, str] = {}, **fields: str) -> aiohttp.FormData:
    data = aiohttp.FormData()
    data.add_field("file", file, filename="a.wav")
    data.add_field("model", model)
    for name, value in {**more, **fields}.items():
        data.add_field(name, value)
    return data


async def test_the_official_client_gets_the_words_of_an_audio_clip_in_each_form(tmp_path: Path) -> None:
    async with talking(tmp_path) as device:
        official = client(device)
        audio = official.audio.transcriptions
        file = ("a.wav", SPEECH)
        assert (await audio.create(model="auto", file=file)).text == COMMAND
        assert await audio.create(model="speech", file=file, response_format="text") == COMMAND + "\n"
        cue = f"00:00:00,000 --> 00:00:00,200\n{COMMAND}\n\n"
        assert await audio.create(model="auto", file=file, response_format="srt") == f"1\n{cue}"
        vtt = "WEBVTT\n\n" + cue.replace(",", ".")
        assert await audio.create(model="auto", file=file, response_format="vtt") == vtt
        verbose = await audio.create(
            model="auto", file=file, response_format="verbose_json", language="en", prompt="a kitchen", temperature=0
        )
        assert (verbose.text, verbose.language, verbose.duration) == (COMMAND, "en", 0.2)
        assert verbose.segments is not None
        (segment,) = verbose.segments
        assert (segment.text, segment.start, segment.end, segment.no_speech_prob) == (COMMAND, 0.0, 0.2, 0.125)
        assert segment.avg_logprob == pytest.approx(-0.1335, abs=1e-3)
        assert (await audio.create(model="whisper-1", file=file, language="English")).text == COMMAND
        assert (await audio.create(model="auto", file=("a.wav", SILENCE))).text == ""
        await official.close()


async def test_words_have_their_times_where_the_client_asks(tmp_path: Path) -> None:
    """Also of an audio clip that was understood before without them."""
    async with talking(tmp_path) as device:
        official = client(device)
        audio, file = official.audio.transcriptions, ("a.wav", SPEECH)
        plain = await audio.create(model="whisper-1", file=file, response_format="verbose_json")
        assert (plain.words, len(plain.segments or ())) == (None, 1)
        timed = await audio.create(
            model="whisper-1", file=file, response_format="verbose_json", timestamp_granularities=["word"]
        )
        assert timed.segments is None
        assert " ".join(word.word for word in timed.words or ()) == COMMAND
        assert [(word.start, word.end) for word in (timed.words or ())[:2]] == [(0.0, 0.05), (0.05, 0.1)]
        silence = await audio.create(
            model="auto",
            file=("a.wav", SILENCE),
            response_format="verbose_json",
            timestamp_granularities=["word", "segment"],
        )
        assert (silence.words, silence.segments) == ([], [])
        await official.close()


async def test_a_model_without_times_of_words_says_so(tmp_path: Path) -> None:
    async with talking(tmp_path, fault="no words") as device:
        more = {"timestamp_granularities[]": "word"}
        answer = await send(device, "transcriptions", form(more=more, response_format="verbose_json"))
        assert (answer.status, answer.code) == (400, "unsupported_feature")
        assert "cannot give the times of words" in answer.message


async def test_a_transcription_is_recorded_with_its_hash_and_without_its_words(tmp_path: Path) -> None:
    async with talking(tmp_path) as device:
        answer = await send(device, "transcriptions", form(), {"x-causeway-tags": "private"})
        assert (answer.status, answer.json["text"]) == (200, COMMAND)
        assert answer.headers["x-causeway-route"] == "edge"
        assert answer.headers["x-causeway-policy"].startswith("test@")
        record = await device.record(answer)
        assert (record.request.kind, record.request.tags) == ("transcription", ("private",))
        assert (record.outcome.status, record.outcome.route, record.outcome.model) == ("ok", "edge", "speech")
        (part,) = record.parts
        assert (part.part, part.size_bytes, part.confidence) == ("file", len(SPEECH), 0.875)
        stored = (await device.get(f"/v1/decisions/{answer.headers['x-causeway-decision']}")).body.decode()
        assert COMMAND not in stored
        assert_what_if_says_nothing(device, record)
        metrics = (await device.get("/metrics")).body.decode()
        assert 'causeway_edge_requests_total{cache="bypass",route="edge",status="ok",target=""} 1.0' in metrics
        device.assert_nothing_leaks()


@contextlib.asynccontextmanager
async def pacing(tmp_path: Path) -> AsyncIterator[tuple[Device, Path]]:
    """A daemon that tells two segments, the second one once the file is there."""
    gate = tmp_path / "gate"
    spec = WorkerSpec(
        "tests.models.parts.workers:TinyEncoder", options={"text": "turn on|the lights", "then": str(gate)}
    )
    async with running(tmp_path / "device", encoders={"audio": spec}, parts=PATIENT) as device:
        yield device, gate


async def test_a_streamed_transcript_tells_each_segment_as_soon_as_it_is_understood(tmp_path: Path) -> None:
    async with pacing(tmp_path) as (device, gate), client(device) as official:
        for deltas in (["turn on", " the lights"], ["turn on the lights"]):  # the second time it is known
            events = await official.audio.transcriptions.create(model="auto", file=("a.wav", SPEECH), stream=True)
            first = await anext(aiter(events))
            gate.touch()
            others = [event async for event in events]
            assert first.type == "transcript.text.delta"
            assert [first.delta, *(event.delta for event in others if event.type == first.type)] == deltas
            assert others[-1].type == "transcript.text.done"
            assert others[-1].text == "turn on the lights"
        device.assert_nothing_leaks()


async def test_a_streamed_transcript_that_breaks_ends_with_an_error(tmp_path: Path) -> None:
    async with pacing(tmp_path) as (device, _), client(device) as official:
        create = official.audio.transcriptions.create
        with pytest.raises(openai.BadRequestError, match="`file`"):
            await create(model="auto", file=("a.wav", b""), stream=True)
        events = await create(model="auto", file=("a.wav", SPEECH), stream=True)
        await anext(aiter(events))
        for child in worker_processes():
            child.kill()
        with pytest.raises(openai.APIError, match="could not be read"):
            await anext(aiter(events))
        device.assert_nothing_leaks()


def assert_what_if_says_nothing(device: Device, record: DecisionRecord) -> None:
    """No policy decided it, so none decides it again."""
    assert what_if(device.parts.policies.active, record, {}).as_recorded.decisions == (None,)


async def test_what_is_wrong_with_a_form_is_named_and_the_next_good_one_is_answered(tmp_path: Path) -> None:
    no_file = aiohttp.FormData({"model": "auto"})
    no_file.add_field("prompt", "x", content_type="text/plain")  # a form with a type is multipart
    cases: list[tuple[object, int, str]] = [
        (no_file, 400, "`file` is missing"),
        (form(model="whisper-9"), 404, "Available: auto, speech"),
        (form(language="EN; rm"), 400, "`language`"),
        (form(language="xx"), 400, "`language`: the language 'xx' is not known"),
        (form(temperature="2"), 400, "`temperature`"),
        (form(temperature="nan"), 400, "`temperature`"),
        (form(prompt="x" * 2000), 400, "`prompt`"),
        (form(response_format="diarized_json"), 400, "json, text, srt, verbose_json, vtt"),
        (form(stream="true", response_format="verbose_json"), 400, "`response_format`"),
        (form(sample="1"), 400, "`sample` is not a known field"),
        (form(more={"timestamp_granularities[]": "word"}), 400, "need `response_format` `verbose_json`"),
        (form(more={"timestamp_granularities[]": "letter"}), 400, "`segment` or `word`"),
        (form(more={f"field{at}": "1" for at in range(20)}), 400, "too many fields"),
        (b"{}", 415, "multipart/form-data"),
        (form(bytes(MAX_BODY_BYTES)), 413, "(`max_body_bytes`). Send a smaller one."),
    ]
    async with talking(tmp_path) as device:
        for data, status, words in cases:
            answer = await send(device, "transcriptions", data)
            assert (answer.status, words in answer.message) == (status, True), answer.message
        cut_off = b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\nx'
        for body in (b"", b"nonsense", b"--b\r\n", cut_off, b"--b--"):
            answer = await send(device, "transcriptions", body, {"Content-Type": "multipart/form-data; boundary=b"})
            assert answer.status == 400, body
        assert (await send(device, "transcriptions", b"", {"Content-Type": "multipart/form-data"})).status == 400
        for name, audio in HOSTILE_CLIPS.items():
            if len(audio) > MAX_BODY_BYTES:
                continue  # the 413 above
            answer = await send(device, "transcriptions", form(audio))
            assert (answer.status, "`file`: " in answer.message, "Send" in answer.message) == (400, True, True), name
        assert (await send(device, "transcriptions", form())).status == 200
        async with device.session.get("/v1/audio/transcriptions") as wrong:
            assert (wrong.status, wrong.headers["Allow"]) == (405, "POST")
        device.assert_nothing_leaks()


async def test_a_configured_language_that_the_encoder_does_not_know_is_not_blamed_on_the_audio(tmp_path: Path) -> None:
    encoders: dict[Modality, WorkerSpec] = {"audio": encoder(COMMAND)}
    config = PartsConfig(audio_timeout_s=WAIT_S, language="xx")
    async with running(tmp_path, encoders=encoders, parts=config) as device:
        unread = await send(device, "transcriptions", form())
        assert (unread.status, unread.code) == (503, "encoder_failed")
        assert "the configured language was refused: the language 'xx' is not known" in unread.message
        degraded = await ask(device, text("hello"), audio())
        assert (degraded.status, degraded.headers["x-causeway-modalities"]) == (200, "audio=failed")
        assert (await send(device, "transcriptions", form(language="en"))).status == 200


async def test_what_is_not_installed_is_named_with_how_to_install_it(tmp_path: Path) -> None:
    async with running(tmp_path) as device:
        deaf = await send(device, "transcriptions", form())
        assert (deaf.status, deaf.code) == (400, "unsupported_feature")
        assert "causeway-router[voice]" in deaf.message
        assert "causeway-models pull speech" in deaf.message
        mute = await send(device, "speech", model="auto", voice="en-us", input="hello")
        assert (mute.status, mute.code) == (400, "unsupported_feature")
        assert "apt install espeak-ng" in mute.message
        assert (await device.record(mute)).outcome.status == "rejected"


async def test_a_child_that_dies_is_an_error_and_a_record(tmp_path: Path) -> None:
    async with talking(tmp_path, fault="die") as device:
        answer = await send(device, "transcriptions", form())
        assert (answer.status, answer.code) == (503, "encoder_failed")
        assert (await device.record(answer)).outcome.status == "error"
        assert (await device.ask("hello")).status == 200
        device.assert_nothing_leaks()


async def test_a_client_that_leaves_gives_its_permit_back(tmp_path: Path) -> None:
    async with talking(tmp_path, fault="hang") as device:
        asking = asyncio.create_task(send(device, "transcriptions", form()))
        encoders = device.parts.encoders
        await until(lambda: encoders is not None and encoders.graph.running, WAIT_S)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(lambda: device.parts.decisions.newest, WAIT_S)
        assert device.newest().outcome.status == "cancelled"
        device.assert_nothing_leaks()


async def test_admission_and_preferences_hold_for_audio_too(tmp_path: Path) -> None:
    once = POLICY.replace("limits: {", "limits: {per_client_rps: 0.001, ")
    async with talking(tmp_path, policy=once) as device:
        away = await send(device, "transcriptions", form(), {"x-causeway-prefer": "only_cloud"})
        assert (away.status, away.code) == (503, "no_route")
        second = await send(device, "transcriptions", form())
        assert (second.status, second.code) == (429, "rate_limit_exceeded")
        assert (await device.record(second)).outcome.status == "rejected"


async def test_the_official_client_gets_speech_as_wav_and_pcm(tmp_path: Path, voices: Path) -> None:
    async with talking(tmp_path, voices) as device:
        official = client(device)
        speech = official.audio.speech
        for more in ({}, {"response_format": "wav", "speed": 2.0}):
            spoken = await speech.create(model="auto", voice="en-us", input=SAID, **more)  # type: ignore[arg-type]
            with wave.open(io.BytesIO(spoken.content)) as file:
                assert (file.getframerate(), file.getnframes()) == (RATE, 100 * len(SAID))
        pcm = await speech.create(model=PROGRAM, voice="de", input=SAID, response_format="pcm")
        assert len(pcm.content) == 2 * int(100 * len(SAID) * 24_000 / RATE)
        commands = (voices / "spoken").read_text()
        assert SAID not in commands  # words are never arguments
        assert [line.split()[-1] for line in commands.splitlines()] == ["175", "350", "175"]
        record = device.newest()
        assert (record.request.kind, record.outcome.route, record.outcome.model) == ("speech", "edge", PROGRAM)
        await official.close()


async def test_what_is_wrong_with_a_text_to_speak_is_named(tmp_path: Path, voices: Path) -> None:
    good: dict[str, Any] = {"model": "auto", "voice": "en-us", "input": "hello"}
    cases: list[tuple[dict[str, Any], int, str]] = [
        ({"voice": "alloy"}, 400, "such as `en-us`"),
        ({"voice": "en-uk"}, 400, "did you mean `en-us`"),
        ({"voice": "-f/etc/passwd"}, 400, "`voice`"),
        ({"voice": {"id": "x"}}, 400, "`voice`"),
        ({"input": ""}, 400, "got 0. Send a text of 1 to 4096 characters."),
        ({"input": "x" * 5000}, 400, "got 5000. Send a text of 1 to 4096 characters."),
        ({"response_format": "mp3"}, 400, "`wav` or `pcm`"),
        ({"speed": 9}, 400, "Send a number from 0.25 to 4."),
        ({"instructions": "whisper"}, 400, "`instructions`"),
        ({"stream_format": "sse"}, 400, "`stream_format`"),
        ({"pitch": 1}, 400, "`pitch` is not a known field"),
        ({"model": "tts-1"}, 404, f"Available: auto, {PROGRAM}"),
        ({"input": "fail"}, 503, "failed with status 3"),
    ]
    async with talking(tmp_path, voices) as device:
        for wrong, status, words in cases:
            answer = await send(device, "speech", **{**good, **wrong})
            assert (answer.status, words in answer.message) == (status, True), answer.message
        assert (await send(device, "speech", **good)).status == 200
        device.assert_nothing_leaks()


def test_speech_that_is_late_ends_with_its_process(voices: Path) -> None:
    async def late(loop: JumpingLoop) -> None:
        speaker = Speaker({"PATH": str(voices)})
        asking = asyncio.create_task(speaker.speak("hang", "de", 1.0, loop.time() + WAIT_S))
        await until((voices / "spoken").exists)
        await until((voices / "spoken").read_text)
        loop.jump()
        with pytest.raises(EncoderFailed, match="took too long"):
            await asking
        assert not psutil.pid_exists(int((voices / "spoken").read_text().split()[0]))

    run_jumping(late)


def test_no_segment_of_a_transcript_ends_after_its_audio() -> None:
    """Whisper's time stamps are of its window of 30 s, and may lie behind the end."""
    found = Found(
        Fact("off", 0.9),
        (Segment("turn it", 0.9, 0.0, 1.5), Segment("off", 0.9, 1.5, 2.0, words=(Word("off", 1.5, 2.0),))),
    )
    transcript = transcript_of(found, 1.25, words=True)
    assert [(one.text, one.start_s, one.end_s) for one in transcript.words] == [("off", 1.25, 1.25)]
    segments = transcript.segments
    assert [(one.start_s, one.end_s) for one in segments] == [(0.0, 1.25), (1.25, 1.25)]
