"""An added voice on a real daemon: its real child speaks; espeak-ng is scripted where its faults are the subject."""

from __future__ import annotations

import asyncio
import contextlib
import io
import signal
import wave
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnxruntime")

from causeway_server.edge_node.parts.speaker import Speaker, Voices
from causeway_server.models.catalog import fit
from causeway_server.models.catalog.artifact import find_artifact
from causeway_server.models.parts.installed import PROGRAM
from causeway_server.models.parts.voices import SETTINGS
from causeway_server.models.publish.add import add_voice
from causeway_server.router.bundle.settings import PartsConfig
from causeway_server.router.errors import EncoderFailed, InvalidRequest, UnsupportedFeature
from tests.jumping_loop import JumpingLoop, run_jumping
from tests.models.parts.test_decoding import WAIT_S
from tests.models.parts.tiny_voice import RATE, samples_of, write_voice
from tests.models.parts.worker_processes import worker_processes
from tests.waiting import until

from ..device import Device, running
from .test_audio_api import client, install_voices, send

pytestmark = pytest.mark.slow
BIG = fit.Device("big", 2**40)
PAUSE = RATE // 5
TEXT = "turn it on. now"
SAMPLES = samples_of("turn it on.") + PAUSE + samples_of("now")


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "account"))
    return install_voices(tmp_path)


@pytest.fixture
def root(tmp_path: Path, programs: Path) -> Path:
    """A folder with the voices `ann`, and `duo` of the speakers `low` and `high`."""
    root = tmp_path / "voices"
    add_voice(write_voice(tmp_path / "files", "ann"), root, device=BIG)
    add_voice(write_voice(tmp_path / "files", "duo", speakers={"low": 0, "high": 1}), root, device=BIG)
    return root


@contextlib.asynccontextmanager
async def speaking(tmp_path: Path, root: Path, programs: Path, voice: str = "en-us") -> AsyncIterator[Device]:
    async with running(
        tmp_path / "device", environ={"PATH": str(programs)}, model_dirs=(str(root),), parts=PartsConfig(voice=voice)
    ) as device:
        yield device


@contextlib.asynccontextmanager
async def speaker(programs: Path, voices: Voices) -> AsyncIterator[Speaker]:
    made = Speaker({"PATH": str(programs)}, voices)
    try:
        yield made
    finally:
        await made.close()


async def added(file: Path, root: Path) -> None:
    await asyncio.to_thread(add_voice, file, root, device=BIG)


def soon() -> float:
    return asyncio.get_running_loop().time() + WAIT_S


async def test_the_official_client_hears_a_voice_that_was_added(tmp_path: Path, root: Path, programs: Path) -> None:
    async with speaking(tmp_path, root, programs, voice="ann") as device, client(device) as official:
        assert not worker_processes()  # none before the first request
        speech = official.audio.speech
        for voice, speed, count in (("ann", 1.0, SAMPLES), ("auto", 1.0, SAMPLES), ("duo+high", 1.0, SAMPLES)):
            spoken = await speech.create(model="auto", voice=voice, input=TEXT, speed=speed)
            with wave.open(io.BytesIO(spoken.content)) as file:
                assert (file.getframerate(), file.getnframes()) == (RATE, count), voice
        fast = await speech.create(model="ann", voice="ann", input="now", speed=2.0)
        with wave.open(io.BytesIO(fast.content)) as file:
            assert file.getnframes() == samples_of("now", 0.5)
        low, high = [
            (await speech.create(model="auto", voice=f"duo+{name}", input="now")).content for name in ("low", "high")
        ]
        assert low != high
        assert low == (await speech.create(model="auto", voice="duo", input="now")).content  # the first speaker
        record = device.newest()
        assert (record.request.kind, record.outcome.route, record.outcome.model) == ("speech", "edge", "duo")
        assert TEXT not in (programs / "spoken").read_text()
        device.assert_nothing_leaks()
    assert not worker_processes()


async def test_samples_of_a_sentence_leave_before_the_next_one_is_spoken(
    tmp_path: Path, root: Path, programs: Path
) -> None:
    async with speaking(tmp_path, root, programs) as device:
        asked: dict[str, Any] = {"model": "auto", "voice": "ann", "response_format": "pcm", "input": "first one. hang"}
        async with device.session.post("/v1/audio/speech", json=asked) as reply:
            assert (reply.status, reply.headers["Transfer-Encoding"]) == (200, "chunked")
            assert reply.headers["Content-Type"] == "audio/pcm; rate=24000"
            first = await reply.content.readexactly(2 * int(samples_of("first one.") * 24_000 / RATE))
            assert any(first)
        # The client left while the second sentence's phonemes were awaited.
        await until(lambda: device.parts.decisions.newest, WAIT_S)
        assert device.newest().outcome.status == "cancelled"
        device.assert_nothing_leaks()
        whole = await send(device, "speech", **{**asked, "input": "one. two. three."})
        pauses = 2 * PAUSE
        count = samples_of("one.") + samples_of("two.") + samples_of("three.") + pauses
        assert len(whole.body) // 2 == pytest.approx(count * 24_000 / RATE, abs=3)


async def test_an_audio_clip_that_breaks_after_its_begin_is_cut_off_and_recorded(
    tmp_path: Path, root: Path, programs: Path
) -> None:
    async with speaking(tmp_path, root, programs) as device:
        asked: dict[str, Any] = {"model": "auto", "voice": "ann", "response_format": "pcm", "input": "first one. fail"}
        async with device.session.post("/v1/audio/speech", json=asked) as reply:
            assert reply.status == 200
            with pytest.raises(Exception, match=r"payload|closed|reset|not enough data"):
                await reply.read()
        assert (device.newest().outcome.status, device.newest().outcome.error) == ("error", "encoder_failed")
        assert (await send(device, "speech", **{**asked, "input": "now"})).status == 200
        device.assert_nothing_leaks()


async def test_what_is_wrong_with_a_voice_or_a_text_is_named(tmp_path: Path, root: Path, programs: Path) -> None:
    good: dict[str, Any] = {"model": "auto", "voice": "ann", "input": "now"}
    cases: list[tuple[dict[str, Any], int, str]] = [
        ({"voice": "anne"}, 400, "did you mean `ann`"),
        ({"voice": "nobody-at-all"}, 400, "or one that was added: ann, duo"),
        ({"voice": "ann+bob"}, 400, "'ann' has no speaker 'bob': it has only one speaker"),
        ({"voice": "duo+middle"}, 400, "its speakers are low, high"),
        ({"voice": "../ann"}, 400, "there is no voice '../ann' on this device"),
        ({"model": PROGRAM}, 404, "Available: auto, ann"),
        ({"input": ""}, 400, "`input`"),
        ({"input": " \n"}, 400, "cannot pronounce `input`"),
        ({"input": "...!"}, 400, "cannot pronounce `input`"),
        ({"input": "\U0001f389\U0001f389"}, 400, "cannot pronounce `input`"),
        ({"input": "\u4f60\u597d"}, 400, "cannot pronounce `input`"),
        ({"input": "x" * 100_000}, 400, "1 to 4096 characters"),
        ({"input": "fail"}, 503, "failed with status 3"),
        ({"response_format": "mp3"}, 400, "Send `wav` or `pcm`"),
    ]
    async with speaking(tmp_path, root, programs) as device:
        for wrong, status, words in cases:
            answer = await send(device, "speech", **{**good, **wrong})
            assert (answer.status, words.lower() in answer.message.lower()) == (status, True), (wrong, answer.message)
        mixed = await send(device, "speech", model="auto", voice="ann", input="\u4f60\u597d\u3002 now. \U0001f389")
        with wave.open(io.BytesIO(mixed.body)) as file:
            assert file.getnframes() == samples_of("now.")  # the others are left out
        longest = await send(device, "speech", model="auto", voice="ann", input="word " * 819)
        assert longest.status == 200
        device.assert_nothing_leaks()


async def test_a_device_without_espeak_ng_says_what_a_voice_needs(tmp_path: Path, root: Path) -> None:
    async with speaking(tmp_path, root, tmp_path / "nothing") as device:
        mute = await send(device, "speech", model="auto", voice="ann", input="hello")
        assert (mute.status, mute.code) == (400, "unsupported_feature")
        assert "apt install espeak-ng" in mute.message


async def test_a_live_session_speaks_with_the_configured_voice(tmp_path: Path, root: Path, programs: Path) -> None:
    async with speaking(tmp_path, root, programs, voice="duo+high") as device:
        async with device.session.ws_connect("/v1/realtime") as socket:
            created = await socket.receive_json()
            assert created["session"]["audio"]["output"]["voice"] == "duo+high"
            await socket.send_json({"type": "session.update", "session": {"output_modalities": ["audio"]}})
            item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]}
            await socket.send_json({"type": "conversation.item.create", "item": item})
            await socket.send_json({"type": "response.create"})
            kinds: list[str] = []
            while not kinds or kinds[-1] != "response.done":
                event = await socket.receive_json()
                kinds.append(event["type"])
        assert event["response"]["status"] == "completed", event
        assert "response.output_audio.delta" in kinds
        device.assert_nothing_leaks()


def _alter(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("spoil", "logged"),
    [
        (lambda folder: (folder / "model.onnx").unlink(), "add the voice again"),
        (lambda folder: _alter(folder / "model.onnx"), "altered after the voice was added"),
        (lambda folder: (folder / SETTINGS).unlink(), "add the voice again"),
        (lambda folder: _alter(folder / SETTINGS), "altered after the voice was added"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "manifest.json"),
    ],
)
async def test_a_voice_that_was_removed_or_altered_is_not_used(
    tmp_path: Path,
    root: Path,
    programs: Path,
    spoil: Callable[[Path], None],
    logged: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    spoil(find_artifact("ann", (root,)).folder)
    async with speaking(tmp_path, root, programs) as device:
        for _ in range(2):
            answer = await send(device, "speech", model="auto", voice="ann", input="now")
            assert (answer.status, answer.code) == (503, "encoder_failed")
        assert logged in caplog.text
        assert str(tmp_path) not in answer.message
        assert (await send(device, "speech", model="auto", voice="duo", input="now")).status == 200
        assert (await send(device, "speech", model="auto", voice="de", input="now")).status == 200
        device.assert_nothing_leaks()


async def test_a_child_that_is_killed_mid_sentence_fails_its_text_and_the_next_one_is_spoken(
    root: Path, programs: Path
) -> None:
    voices = Voices([root])
    async with speaker(programs, voices) as device:
        await device.speak("now", "ann", 1.0, soon())
        (child,) = worker_processes()
        child.send_signal(signal.SIGSTOP)  # it is within the sentence
        asking = asyncio.create_task(device.speak("again", "ann", 1.0, soon()))
        await until(lambda: voices.busy, WAIT_S)
        child.kill()
        with pytest.raises(EncoderFailed, match="'ann' failed: its process died"):
            await asking
        assert (await device.speak("now", "ann", 1.0, soon())).samples
        assert voices.starts == 2


def test_a_child_that_hangs_is_replaced_at_the_deadline(root: Path, programs: Path) -> None:
    async def hang(loop: JumpingLoop) -> None:
        voices = Voices([root])
        async with speaker(programs, voices) as device:
            await device.speak("now", "ann", 1.0, soon())
            (child,) = worker_processes()
            child.send_signal(signal.SIGSTOP)
            asking = asyncio.create_task(device.speak("again", "ann", 1.0, loop.time() + 30.0))
            await until(lambda: voices.busy)
            loop.jump()
            with pytest.raises(EncoderFailed, match="took too long"):
                await asking
            loop.jump()
            assert (await device.speak("now", "ann", 1.0, soon())).samples
            assert voices.starts == 2

    run_jumping(hang)


async def test_a_sentence_stops_within_itself_when_it_is_not_wanted_any_more(tmp_path: Path, programs: Path) -> None:
    """The child ends the network's run and is kept: a text that nobody waits for holds up no other one."""
    root = tmp_path / "voices"
    await added(write_voice(tmp_path / "files", "slow", work=500), root)
    voices = Voices([root])
    async with speaker(programs, voices) as device:
        await device.speak("a", "slow", 1.0, soon())
        asking = asyncio.create_task(device.speak("abcdef" * 50, "slow", 1.0, soon()))
        await until(lambda: voices.busy, WAIT_S)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert (await device.speak("b", "slow", 1.0, soon())).samples
        assert voices.starts == 1


async def test_voices_take_turns_in_little_memory(tmp_path: Path, root: Path, programs: Path) -> None:
    """Ten texts at once by three voices, of which one may be loaded."""
    await added(write_voice(tmp_path / "files", "eve"), root)
    voices = Voices([root], loaded=1)
    async with speaker(programs, voices) as device:
        names = ["ann", "duo", "eve", "ann", "duo+high", "eve", "ann", "duo", "eve", "ann"]
        spoken = await asyncio.gather(*(device.speak(TEXT, name, 1.0, soon()) for name in names))
        assert {len(one.samples) // 2 for one in spoken} == {SAMPLES}
        assert voices.running == 1
        assert len(worker_processes()) == 1


async def test_a_voice_that_needs_more_memory_than_it_may_have_fails_alone(root: Path, programs: Path) -> None:
    voices = Voices([root], memory_bytes=lambda voice: 2**20 if voice.name == "ann" else voice.memory_bytes)
    async with speaker(programs, voices) as device:
        found = await asyncio.gather(
            *(device.speak("now", "ann", 1.0, soon()) for _ in range(10)), return_exceptions=True
        )
        assert all(isinstance(one, EncoderFailed) for one in found), found
        assert (await device.speak("now", "duo", 1.0, soon())).samples


def test_a_voice_waits_for_a_place_until_the_deadline(root: Path, programs: Path) -> None:
    async def wait(loop: JumpingLoop) -> None:
        voices = Voices([root], loaded=1)
        async with speaker(programs, voices) as device:
            ann, _ = voices.find("ann") or pytest.fail("no voice")
            async with voices.using(ann, soon()):
                asking = asyncio.create_task(device.speak("now", "duo", 1.0, loop.time() + 30.0))
                for _ in range(5):
                    await asyncio.sleep(0)
                loop.jump()
                with pytest.raises(EncoderFailed, match="took too long"):
                    await asking

    run_jumping(wait)


def test_an_idle_voice_is_unloaded(root: Path, programs: Path) -> None:
    async def idle(loop: JumpingLoop) -> None:
        voices = Voices([root], idle_s=60.0)
        async with speaker(programs, voices) as device:
            await device.speak("now", "ann", 1.0, soon())
            assert voices.running == 1
            loop.jump()
            await until(lambda: not voices.running)
            assert not worker_processes()
            assert (await device.speak("now", "ann", 1.0, soon())).samples
            assert voices.starts == 2

    run_jumping(idle)


async def test_a_voice_that_is_replaced_speaks_again(tmp_path: Path, root: Path, programs: Path) -> None:
    """Its former process is not asked for the new one's texts."""
    import shutil

    async with speaker(programs, Voices([root])) as device:
        before = await device.speak("now", "ann", 1.0, soon())
        shutil.rmtree(root / "ann")
        with pytest.raises(InvalidRequest):
            await device.speak("now", "ann", 1.0, soon())
        await added(write_voice(tmp_path / "new", "ann", per_symbol=80), root)
        after = await device.speak("now", "ann", 1.0, soon())
        assert len(after.samples) == 2 * len(before.samples)


async def test_a_language_is_still_spoken_by_the_program(root: Path, programs: Path) -> None:
    async with speaker(programs, Voices([root])) as device:
        assert device.model_of("de") == PROGRAM
        assert device.model_of("duo+high") == "duo"
        assert (await device.speak("now", "de", 1.0, soon())).rate != RATE
        assert not worker_processes()
    mute = Speaker({}, Voices([root]))
    with pytest.raises(UnsupportedFeature):
        await mute.speak("now", "de", 1.0, soon())
