"""Audio in a session as values: it becomes an item, then a part of a request; everything of it is bounded."""

from __future__ import annotations

import base64
import json

import pytest

from causeway_server.models.parts.decoding.audio import decode_audio
from causeway_server.router.errors import EncoderFailed, Shed
from causeway_server.router.openai.audio import Transcript
from causeway_server.router.realtime.response import SessionLimits, TranscribeAudio
from causeway_server.router.types import AudioPart, Chunk, ToolCallDelta

from .test_session import Event, Talk, error, kinds

LIMITS = SessionLimits(max_audio_s=1.0, max_clips=3)
HALF_SECOND = base64.b64encode(b"\1\2" * 12_000).decode()
TELL: Event = {"audio": {"input": {"transcription": {"model": "whisper-1"}}}}


@pytest.fixture
def talk() -> Talk:
    return Talk(limits=LIMITS)


def append(talk: Talk, audio: str = HALF_SECOND) -> list[Event]:
    return talk.send("input_audio_buffer.append", audio=audio)


def commit(talk: Talk) -> list[Event]:
    append(talk)
    return talk.send("input_audio_buffer.commit")


def clips_of(talk: Talk) -> list[AudioPart]:
    parts = [message.content for message in talk.start().request.messages]
    return [part for content in parts if isinstance(content, tuple) for part in content if isinstance(part, AudioPart)]


def test_a_committed_audio_is_an_item_and_a_part_of_the_request(talk: Talk) -> None:
    assert talk.created[0]["session"]["audio"]["input"]["format"] == {"type": "audio/pcm", "rate": 24_000}
    assert append(talk) == append(talk) == []
    events = talk.send("input_audio_buffer.commit")
    assert kinds(events) == ["input_audio_buffer.committed", "conversation.item.added", "conversation.item.done"]
    assert talk.effect is None  # the client did not ask for what is said
    item = events[1]["item"]
    assert (events[0]["item_id"], events[0]["previous_item_id"]) == (item["id"], None)
    assert item["content"] == [{"type": "input_audio", "transcript": None}]
    (audio,) = clips_of(talk)
    assert audio.format == "wav"
    assert decode_audio(base64.b64decode(audio.data), 2.0).seconds == 1.0
    assert error(talk.send("input_audio_buffer.commit"))["code"] == "input_audio_buffer_commit_empty"


def test_an_audio_clip_without_room_in_memory_is_refused_and_what_there_is_stays() -> None:
    told: list[int] = []

    def hold(size_bytes: int) -> None:
        if size_bytes > 60_000:
            raise Shed("no room", retry_after_s=1.0)
        told.append(size_bytes)

    talk = Talk(limits=LIMITS, hold_audio=hold)
    assert append(talk) == append(talk) == []
    assert error(talk.send("input_audio_buffer.commit"))["code"] == error(append(talk))["code"] == Shed.code
    assert told == [24_000, 48_000]
    talk.send("input_audio_buffer.clear")
    commit(talk)
    assert told[2:4] == [0, 24_000]
    assert told[-1] == len(clips_of(talk)[0].data)


def test_a_cleared_audio_is_gone(talk: Talk) -> None:
    append(talk)
    assert kinds(talk.send("input_audio_buffer.clear")) == ["input_audio_buffer.cleared"]
    assert error(talk.send("input_audio_buffer.commit"))["code"] == "input_audio_buffer_commit_empty"


def test_what_was_said_is_told_and_shown_in_the_item(talk: Talk) -> None:
    talk.send("session.update", session=TELL)
    item_id = commit(talk)[0]["item_id"]
    assert isinstance(talk.effect, TranscribeAudio)
    talk.session.transcribed(talk.effect, Transcript("lights on", "en", 0.5))
    (event,) = talk.read()
    assert event["type"] == "conversation.item.input_audio_transcription.completed"
    assert (event["item_id"], event["content_index"], event["transcript"]) == (item_id, 0, "lights on")
    assert event["usage"] == {"type": "duration", "seconds": 0.5}
    shown = talk.send("conversation.item.retrieve", item_id=item_id)[0]["item"]
    assert shown["content"] == [{"type": "input_audio", "transcript": "lights on"}]
    assert len(clips_of(talk)) == 1  # constraints bind the audio as long as it is in the conversation


def test_an_item_may_be_deleted_before_it_is_known_what_was_said(talk: Talk) -> None:
    talk.send("session.update", session=TELL)
    item_id = commit(talk)[0]["item_id"]
    effect = talk.effect
    assert isinstance(effect, TranscribeAudio)
    talk.send("conversation.item.delete", item_id=item_id)
    talk.say(id=item_id)
    talk.session.transcribed(effect, Transcript("lights on", "en", 0.5))
    talk.session.not_transcribed(effect, EncoderFailed("it was late"))
    events = talk.read()
    assert kinds(events) == [
        "conversation.item.input_audio_transcription.completed",
        "conversation.item.input_audio_transcription.failed",
    ]
    assert events[1]["error"]["message"] == "it was late"


def test_an_item_has_audio_beside_text(talk: Talk) -> None:
    content = [{"type": "input_audio", "audio": HALF_SECOND}, {"type": "input_text", "text": "and be quick"}]
    events = talk.send("conversation.item.create", item={"type": "message", "role": "user", "content": content})
    assert events[0]["item"]["content"] == [{"type": "input_audio", "transcript": None}, content[1]]
    assert HALF_SECOND not in json.dumps(events)
    assert len(clips_of(talk)) == 1


def test_the_oldest_items_give_way_to_new_audio_clips(talk: Talk) -> None:
    first, second = commit(talk)[0]["item_id"], commit(talk)[0]["item_id"]
    talk.say()
    events = commit(talk)  # three halves of a second, where one second is allowed
    assert kinds(events)[-1] == "conversation.item.deleted"
    assert events[-1]["item_id"] == first
    assert len(clips_of(talk)) == 2
    assert second in json.dumps(talk.send("conversation.item.retrieve", item_id=second))


def test_a_conversation_that_may_not_be_shortened_keeps_the_audio_that_does_not_fit(talk: Talk) -> None:
    talk.send("session.update", session={"truncation": "disabled"})
    commit(talk)
    commit(talk)
    assert error(commit(talk))["code"] == "conversation_full"
    talk.send("session.update", session={"truncation": "auto"})
    assert "input_audio_buffer.committed" in kinds(talk.send("input_audio_buffer.commit"))


@pytest.mark.parametrize(
    ("audio", "code"),
    [("%%%", "invalid_value"), (base64.b64encode(bytes(48_004)).decode(), "input_audio_buffer_full"), (7, None)],
)
def test_a_wrong_audio_is_refused_and_the_buffer_stays(talk: Talk, audio: object, code: str | None) -> None:
    append(talk)
    refused = error(talk.send("input_audio_buffer.append", audio=audio))
    assert code is None or refused["code"] == code
    assert "input_audio_buffer.committed" in kinds(talk.send("input_audio_buffer.commit"))
    content = [{"type": "input_audio", "audio": audio}]
    item = {"type": "message", "role": "user", "content": content}
    assert error(talk.send("conversation.item.create", item=item))["param"] == "item.content[0].audio"


@pytest.mark.parametrize(
    ("session", "param"),
    [
        ({"audio": {"input": {"turn_detection": {"type": "server_vad"}}}}, "session.audio.input.turn_detection"),
        ({"audio": {"input": {"format": {"type": "audio/pcmu"}}}}, "session.audio.input.format.type"),
        ({"audio": {"output": {"voice": "alloy"}}}, "session.audio.output"),
    ],
)
def test_what_is_not_made_here_is_refused(talk: Talk, session: Event, param: str) -> None:
    assert error(talk.send("session.update", session=session))["param"] == param


def test_only_a_user_speaks_and_a_session_keeps_its_audio(talk: Talk) -> None:
    item = {"type": "message", "role": "assistant", "content": [{"type": "input_audio", "audio": HALF_SECOND}]}
    assert error(talk.send("conversation.item.create", item=item))["param"] == "item.content[0]"
    talk.say()
    assert error(talk.send("response.create", response=TELL))["param"] == "response.audio"


def test_a_session_without_audio_says_what_to_install() -> None:
    talk = Talk(no_audio="install something.")
    assert "audio" not in talk.created[0]["session"]
    for kind in ("append", "commit", "clear"):
        refused = error(talk.send(f"input_audio_buffer.{kind}", audio=HALF_SECOND))
        assert (refused["code"], refused["message"]) == ("unsupported_feature", "`type`: install something.")
    assert error(talk.send("session.update", session=TELL))["param"] == "session.audio.input"


# --- spoken answers --------------------------------------------------------------------------------------------------


def test_a_spoken_answer_has_its_text_as_transcript_and_is_text_in_the_next_request() -> None:
    talk = Talk(limits=SessionLimits(speaks=True))
    updated = talk.send("session.update", session={"audio": {"output": {"voice": "de", "speed": 1.5}}})
    assert updated[0]["session"]["audio"]["output"]["voice"] == "de"
    talk.say()
    start = talk.start(output_modalities=["audio"])
    assert start.voice is not None
    assert (start.voice.name, start.voice.speed) == ("de", 1.5)
    response = start.response
    response.chunk(Chunk(text="It is noon. I"))
    assert response.ready_to_speak() == "It is noon."
    response.audio(b"\1\2")
    response.chunk(Chunk(text=" think", finish_reason="stop"))
    assert response.ready_to_speak() == ""
    assert response.ready_to_speak(rest=True) == "I think"
    response.complete()
    events = talk.read()
    assert kinds(events) == [
        "response.output_item.added",
        "conversation.item.added",
        "response.content_part.added",
        "response.output_audio_transcript.delta",
        "response.output_audio.delta",
        "response.output_audio_transcript.delta",
        "response.output_audio.done",
        "response.output_audio_transcript.done",
        "response.content_part.done",
        "response.output_item.done",
        "conversation.item.done",
        "response.done",
    ]
    assert base64.b64decode(events[4]["delta"]) == b"\1\2"
    content = [{"type": "output_audio", "transcript": "It is noon. I think"}]
    assert events[-1]["response"]["output"][0]["content"] == content
    talk.say("thanks")
    assert talk.start().request.messages[1].content == "It is noon. I think"


@pytest.mark.parametrize("pieces", [('{"name":"lights","arguments":{}}',), ("\n", " {", '"name": "a. b"}')])
def test_a_call_in_the_text_of_an_answer_is_its_transcript_and_not_spoken(pieces: tuple[str, ...]) -> None:
    talk = Talk(limits=SessionLimits(speaks=True))
    talk.say()
    response = talk.start(output_modalities=["audio"]).response
    for piece in pieces:
        response.chunk(Chunk(text=piece))
        assert response.ready_to_speak() == ""
    response.chunk(Chunk(text="", finish_reason="stop"))
    assert response.ready_to_speak(rest=True) == ""
    response.complete()
    content = [{"type": "output_audio", "transcript": "".join(pieces)}]
    assert talk.read()[-1]["response"]["output"][0]["content"] == content


def test_a_call_is_not_spoken() -> None:
    talk = Talk(limits=SessionLimits(speaks=True))
    talk.say()
    response = talk.start(output_modalities=["audio"]).response
    response.chunk(Chunk(tool_calls=(ToolCallDelta(0, "call_1", "lights", "{}"),), finish_reason="tool_calls"))
    assert response.ready_to_speak(rest=True) == ""
    response.complete()
    assert not any("audio" in kind for kind in kinds(talk.read()))


def test_a_session_of_a_device_that_does_not_speak_answers_with_text(talk: Talk) -> None:
    talk.say()
    refused = error(talk.send("response.create", response={"output_modalities": ["audio"]}))
    assert (refused["param"], "espeak-ng" in refused["message"]) == ("response.output_modalities[0]", True)
