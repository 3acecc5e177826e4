"""What is told of an audio clip while somebody still speaks: only what two transcripts in a row agree on."""

from __future__ import annotations

import base64

import pytest

from causeway_server.router.realtime.response import DetectSpeech, SessionLimits, TranscribePartial
from causeway_server.router.realtime.spoken_input import StablePrefix

from .test_session import Event, Talk, kinds

LIMITS = SessionLimits(max_audio_s=10.0, detects_turns=True, partial_interval_s=1.0)
TELL: Event = {"transcription": {"model": "speech"}}
SECOND = base64.b64encode(bytes(48_000)).decode()
DELTA = "conversation.item.input_audio_transcription.delta"


@pytest.mark.parametrize(
    ("transcripts", "told"),
    [
        (["Turn on", "Turn on the", "Turn on the light."], ["", "Turn on", " the"]),
        (["Wake me a", "wake me at", "Wake me, at six"], ["", "wake me", " at"]),
        (["one two three", "one too three", "one two three", "one two three"], ["", "one", "", " two three"]),
        (["hello there", "yellow there", "", "hello"], ["", "", "", ""]),
        (["one two", "one two", "other words", "other words now"], ["", "one two", "", ""]),
    ],
)
def test_words_are_told_once_two_transcripts_agree_on_them(transcripts: list[str], told: list[str]) -> None:
    certain = StablePrefix()
    assert [certain.take(transcript) for transcript in transcripts] == told


def talking(**settings: object) -> Talk:
    talk = Talk(limits=LIMITS)
    talk.send("session.update", session={"audio": {"input": {**TELL, **settings}}})
    return talk


def append(talk: Talk) -> TranscribePartial | None:
    talk.send("input_audio_buffer.append", audio=SECOND)
    return talk.session.partial()


def test_a_client_that_commits_by_itself_is_told_what_was_said_so_far_of_the_item_to_come() -> None:
    talk = talking()
    first, second = append(talk), append(talk)
    assert first is not None
    assert second is not None
    assert (len(first.wav), len(second.wav)) == (48_044, 96_044)
    assert talk.session.partial() is None  # nothing is new
    talk.session.partly_transcribed(first, "turn on")
    talk.session.partly_transcribed(second, "turn on the light")
    (delta,) = talk.read()
    assert (delta["type"], delta["delta"], delta["content_index"]) == (DELTA, "turn on", 0)
    committed = talk.send("input_audio_buffer.commit")
    assert committed[0]["item_id"] == delta["item_id"]
    third = append(talk)
    assert third is not None
    assert third.item_id != delta["item_id"]
    talk.session.partly_transcribed(second, "turn on the light")  # it comes too late
    assert talk.read() == []


def test_of_detected_turns_only_speech_is_transcribed_meanwhile() -> None:
    talk = talking(turn_detection={"type": "server_vad"})

    def hear(probability: float) -> TranscribePartial | None:
        talk.send("input_audio_buffer.append", audio=SECOND)
        assert isinstance(talk.effect, DetectSpeech)
        talk.session.detected(talk.effect, [probability] * (len(talk.effect.pcm) // 1536), b"")
        return talk.session.partial()

    assert hear(0.0) is None
    partial = hear(1.0)
    assert partial is not None
    (started,) = talk.read()
    assert partial.item_id == started["item_id"]
    assert len(partial.wav) == pytest.approx(1.3 * 48_000, abs=3 * 1536)
    assert hear(0.0) is None
    talk.session.partly_transcribed(partial, "turn on")
    assert DELTA not in kinds(talk.read())


def test_without_a_wish_for_transcripts_or_where_they_are_off_there_are_none() -> None:
    assert append(Talk(limits=LIMITS)) is None
    talk = Talk(limits=SessionLimits(max_audio_s=10.0))
    talk.send("session.update", session={"audio": {"input": TELL}})
    assert append(talk) is None
