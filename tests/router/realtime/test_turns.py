"""Turns that are detected in the audio of a session: time is counted in windows of 32 ms, and no clock is read."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import pytest

from causeway_server.models.parts.decoding.audio import decode_audio
from causeway_server.models.parts.process.messages import SPEECH_RATE, SPEECH_WINDOW
from causeway_server.router.openai.audio import Transcript
from causeway_server.router.realtime.response import (
    CancelResponse,
    DetectSpeech,
    Effect,
    SessionLimits,
    StartResponse,
    TranscribeAudio,
)
from causeway_server.router.types import AudioPart, Chunk

from .test_session import Event, Talk, error, kinds

LIMITS = SessionLimits(max_audio_s=3.0, detects_turns=True)
WINDOW_MS = 32
TURN = 4  # windows of silence that end a turn
VAD: Event = {"type": "server_vad", "silence_duration_ms": TURN * WINDOW_MS, "prefix_padding_ms": 2 * WINDOW_MS}
STARTED, STOPPED = "input_audio_buffer.speech_started", "input_audio_buffer.speech_stopped"
ITEM = ["input_audio_buffer.committed", "conversation.item.added", "conversation.item.done"]


def listening(**settings: object) -> Talk:
    talk = Talk(limits=LIMITS)
    audio = {"input": {"turn_detection": {**VAD, **settings}, "transcription": {"model": "speech"}}}
    (updated,) = talk.send("session.update", session={"audio": audio})
    assert updated["session"]["audio"]["input"]["turn_detection"]["threshold"] == settings.get("threshold", 0.5)
    return talk


def hear(talk: Talk, *probabilities: float) -> tuple[list[Event], list[Effect]]:
    """Send an audio clip of as many windows; return the events, and what the caller has to do."""
    pcm = bytes(2 * SPEECH_WINDOW * len(probabilities))
    assert talk.send("input_audio_buffer.append", audio=base64.b64encode(pcm).decode()) == []
    assert isinstance(talk.effect, DetectSpeech)
    assert len(talk.effect.pcm) == len(pcm)
    effects = talk.session.detected(talk.effect, probabilities, b"state")
    return talk.read(), effects


def seconds(hear_audio: Effect) -> float:
    assert isinstance(hear_audio, TranscribeAudio)
    return decode_audio(base64.b64decode(hear_audio.wav), 10.0).seconds


def test_a_turn_starts_after_two_windows_of_speech_ends_with_silence_and_is_answered() -> None:
    talk = listening()
    assert hear(talk, *[0.1] * 20) == ([], [])
    (started,), effects = hear(talk, 0.9, 0.9)
    assert (started["type"], effects) == (STARTED, [])
    assert started["audio_start_ms"] == (20 - 2) * WINDOW_MS  # with its padding
    assert hear(talk, *[0.9] * 5, *[0.1] * (TURN - 1)) == ([], [])
    events, effects = hear(talk, 0.1)
    assert kinds(events) == [STOPPED, *ITEM, "response.created"]
    assert events[0]["audio_end_ms"] == (20 + 2 + 5 + TURN) * WINDOW_MS
    assert {events[0]["item_id"], events[1]["item_id"], events[2]["item"]["id"]} == {started["item_id"]}
    heard, start = effects
    assert seconds(heard) == pytest.approx((2 + 2 + 5 + TURN) * WINDOW_MS / 1000)
    assert isinstance(start, StartResponse)
    (message,) = start.request.messages
    assert isinstance(message.content, tuple)
    assert isinstance(message.content[0], AudioPart)
    start.response.chunk(Chunk(text="Done", finish_reason="stop"))
    start.response.complete()
    talk.read()
    assert kinds(hear(talk, *[0.9] * 3)[0]) == [STARTED]


@pytest.mark.parametrize(
    "probabilities",
    [pytest.param([0.1, 0.9, 0.1, 0.9, 0.1], id="clicks"), pytest.param([0.6] * 9, id="below the threshold")],
)
def test_what_is_no_speech_starts_no_turn(probabilities: Sequence[float]) -> None:
    assert hear(listening(threshold=0.7), *probabilities) == ([], [])


def test_a_pause_that_is_too_short_does_not_end_a_turn() -> None:
    talk = listening()
    hear(talk, 0.9, 0.9)
    assert hear(talk, *[0.1] * (TURN - 1), 0.6, *[0.1] * (TURN - 1)) == ([], [])
    assert hear(talk, *[0.4] * 20) != ([], [])  # neither speech nor silence: silence goes on


def test_speech_cancels_the_answer_unless_the_client_says_otherwise() -> None:
    for interrupts in (True, False):
        talk = listening(interrupt_response=interrupts)
        talk.say()
        talk.start()
        talk.read()
        events, effects = hear(talk, 0.9, 0.9)
        if interrupts:
            assert kinds(events)[-1] == "response.done"
            assert events[-1]["response"]["status_details"] == {"type": "cancelled", "reason": "turn_detected"}
            assert effects == [CancelResponse()]
        else:
            assert (kinds(events), effects) == ([STARTED], [])
            events, (heard,) = hear(talk, *[0.1] * TURN)  # it is an item, and told; the running answer goes on
            assert isinstance(heard, TranscribeAudio)
            assert kinds(events) == [STOPPED, *ITEM, "error"]
            assert events[-1]["error"]["code"] == "conversation_already_has_active_response"


def test_an_answer_outside_the_conversation_is_not_interrupted() -> None:
    talk = listening()
    talk.say()
    talk.start(conversation="none")
    assert kinds(hear(talk, 0.9, 0.9)[0]) == [STARTED]
    assert talk.session.running


def test_a_turn_may_be_left_to_the_client_to_answer() -> None:
    talk = listening(create_response=False)
    events, (heard,) = hear(talk, 0.9, 0.9, *[0.1] * TURN)
    assert kinds(events) == [STARTED, STOPPED, *ITEM]
    assert isinstance(heard, TranscribeAudio)
    talk.session.transcribed(heard, Transcript("lights on", "en", 1.0, ()))
    assert talk.read()[0]["item_id"] == events[0]["item_id"]


def test_endless_speech_is_cut_into_turns_of_the_longest_audio_and_silence_is_not_kept() -> None:
    talk = listening(create_response=False)
    for _ in range(40):
        assert hear(talk, *[0.1] * 20) == ([], [])  # 26 s of silence
    heard = [effect for _ in range(40) for effect in hear(talk, *[0.9] * 20)[1]]
    assert len(heard) == 8
    assert all(LIMITS.max_audio_s - 2 * WINDOW_MS / 1000 < seconds(one) <= LIMITS.max_audio_s for one in heard)
    too_long = base64.b64encode(bytes(2 * SPEECH_RATE * 4)).decode()
    assert error(talk.send("input_audio_buffer.append", audio=too_long))["code"] == "input_audio_buffer_full"


def test_a_client_may_clear_or_commit_the_turn_that_goes_on() -> None:
    talk = listening()
    (started,), _ = hear(talk, 0.9, 0.9, 0.9)
    assert kinds(talk.send("input_audio_buffer.clear")) == ["input_audio_buffer.cleared"]
    assert hear(talk, *[0.1] * TURN) == ([], [])
    (again,), _ = hear(talk, *[0.9] * 4)
    assert again["item_id"] != started["item_id"]
    events = talk.send("input_audio_buffer.commit")
    assert kinds(events) == ITEM
    assert events[0]["item_id"] == again["item_id"]
    assert hear(talk, *[0.1] * TURN) == ([], [])


def test_what_was_judged_of_an_audio_clip_that_is_gone_is_dropped() -> None:
    talk = listening()
    talk.send("input_audio_buffer.append", audio=base64.b64encode(bytes(2 * SPEECH_WINDOW * 3)).decode())
    judged = talk.effect
    assert isinstance(judged, DetectSpeech)
    talk.send("input_audio_buffer.clear")
    talk.read()
    assert talk.session.detected(judged, [0.9] * 3, b"state") == []
    assert talk.read() == []


def test_audio_in_any_pieces_gives_the_same_turns() -> None:
    """Pieces end within windows and within samples; what is no whole window waits for the next piece."""
    whole, pieces = listening(), listening()
    probabilities = [0.1] * 3 + [0.9] * 7 + [0.1] * 6
    events, _ = hear(whole, *probabilities)
    pcm = bytes(2 * SPEECH_WINDOW * len(probabilities))
    told, at = [], 0
    for start in range(0, len(pcm), 1001):
        pieces.send("input_audio_buffer.append", audio=base64.b64encode(pcm[start : start + 1001]).decode())
        if isinstance(pieces.effect, DetectSpeech):
            windows = len(pieces.effect.pcm) // (2 * SPEECH_WINDOW)
            pieces.session.detected(pieces.effect, probabilities[at : at + windows], b"")
            at += windows
            told += pieces.read()
    assert at == len(probabilities)
    assert [event for event in told if "audio_" in event["type"]] == [e for e in events if "audio_" in e["type"]]


@pytest.mark.parametrize(
    "detection",
    [
        {"type": "server_vad", "threshold": 2},
        {"type": "server_vad", "silence_duration_ms": -1},
        {"type": "voice"},
        "server_vad",
    ],
)
def test_a_wrong_setting_is_refused_by_name(detection: object) -> None:
    update = {"audio": {"input": {"turn_detection": detection}}}
    refused = error(Talk(limits=LIMITS).send("session.update", session=update))
    assert refused["param"].startswith("session.audio.input.turn_detection")


def test_a_server_that_detects_no_turns_says_so() -> None:
    talk = Talk(limits=SessionLimits(max_audio_s=1.0))
    refused = error(talk.send("session.update", session={"audio": {"input": {"turn_detection": VAD}}}))
    assert (refused["code"], refused["param"]) == ("unsupported_feature", "session.audio.input.turn_detection")
    assert kinds(talk.send("session.update", session={"audio": {"input": {"turn_detection": None}}})) == [
        "session.updated"
    ]


def test_another_setting_of_the_input_leaves_the_detection_as_it_is_and_null_ends_it() -> None:
    talk = listening()
    (updated,) = talk.send("session.update", session={"audio": {"input": {"transcription": None}}})
    assert updated["session"]["audio"]["input"]["turn_detection"] is not None
    hear(talk, 0.9, 0.9)
    talk.send("session.update", session={"audio": {"input": {"turn_detection": None}}})
    talk.send("input_audio_buffer.append", audio=base64.b64encode(bytes(9600)).decode())
    assert talk.effect is None
    assert kinds(talk.send("input_audio_buffer.commit")) == ITEM
