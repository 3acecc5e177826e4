"""A session as values: events of the client in, events for the client out."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from causeway_server.router.errors import EngineCrashed, InvalidRequest
from causeway_server.router.realtime.event_log import EventLog, EventsLost
from causeway_server.router.realtime.response import CancelResponse, Effect, SessionLimits, StartResponse
from causeway_server.router.realtime.session import RealtimeSession
from causeway_server.router.types import Chunk, RoutingHints, ToolCallDelta, Usage

Event = dict[str, Any]
HELLO: Event = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]}


class Talk:
    """A session, and a client that reads everything."""

    def __init__(
        self,
        hints: RoutingHints | None = None,
        limits: SessionLimits | None = None,
        no_audio: str = "it takes none.",
        hold_audio: Callable[[int], None] = lambda _: None,
    ) -> None:
        numbers = itertools.count()
        self.session = RealtimeSession(
            "sess_1",
            "auto",
            hints or RoutingHints(),
            limits or SessionLimits(),
            lambda: f"id{next(numbers)}",
            no_audio,
            hold_audio,
        )
        self.effect: Effect | None = None
        self.created = self.read()

    def send(self, kind: str, **fields: object) -> list[Event]:
        self.effect = self.session.receive(json.dumps({"type": kind, **fields}).encode())
        return self.read()

    def read(self) -> list[Event]:
        events = []
        while (event := self.session.log.take()) is not None:
            events.append(json.loads(event))
        return events

    def say(self, text: str = "hello", **fields: object) -> list[Event]:
        item = {**HELLO, "content": [{"type": "input_text", "text": text}], **fields}
        return self.send("conversation.item.create", item=item)

    def start(self, **response: object) -> StartResponse:
        self.send("response.create", response=response)
        assert isinstance(self.effect, StartResponse)
        return self.effect


def kinds(events: list[Event]) -> list[str]:
    return [event["type"] for event in events]


def error(events: list[Event]) -> Event:
    assert kinds(events) == ["error"]
    found: Event = events[0]["error"]
    return found


def test_a_session_shows_its_settings_and_an_update_changes_them() -> None:
    talk = Talk()
    assert kinds(talk.created) == ["session.created"]
    assert talk.created[0]["session"]["output_modalities"] == ["text"]
    updated = talk.send("session.update", session={"type": "realtime", "instructions": "Be brief.", "audio": None})
    assert updated[0]["session"]["instructions"] == "Be brief."
    talk.say()
    assert [message.role for message in talk.start().request.messages] == ["system", "user"]


@pytest.mark.parametrize(
    ("session", "param"),
    [
        ({"output_modalities": ["audio"]}, "session.output_modalities[0]"),
        ({"audio": {"output": {"voice": "alloy"}}}, "session.audio.output"),
        ({"model": "another"}, "session.model"),
        ({"instruction": "x"}, "session.instruction"),
        ({"tools": [{"type": "function"}]}, "session.tools[0].name"),
        ({"tool_choice": "required"}, "session.tool_choice"),
        ({"causeway": {"tag": ["private"]}}, "session.causeway.tag"),
        ({"causeway": {"prefer": "only_cloud"}}, "session.causeway.prefer"),
    ],
)
def test_a_wrong_setting_changes_nothing(session: Event, param: str) -> None:
    """A misspelt request for privacy is not ignored, and one cannot widen what the connection asked for."""
    talk = Talk(RoutingHints(prefer="only_on_device"))
    events = talk.send("session.update", session=session, event_id="mine")
    assert (error(events)["param"], error(events)["event_id"]) == (param, "mine")
    talk.say()
    assert [message.role for message in talk.start().request.messages] == ["user"]


@pytest.mark.parametrize(
    ("others", "param", "why"),
    [
        ({"tracing": "auto"}, "session.tracing", "traces are configured at the server"),
        ({"include": ["x"], "speculation": 1}, "session.include", "`session.speculation`: this setting does not exist"),
    ],
)
def test_an_update_applies_what_it_knows_and_names_the_rest(others: Event, param: str, why: str) -> None:
    """Clients of OpenAI's send their whole configuration: one field must not cost the others."""
    talk = Talk()
    events = talk.send("session.update", session={"instructions": "Be brief.", **others}, event_id="mine")
    assert kinds(events) == ["session.updated", "error"]
    fault = error(events[1:])
    assert (fault["code"], fault["param"], fault["event_id"]) == ("unsupported_feature", param, "mine")
    assert why in fault["message"]
    assert "The rest was applied." in fault["message"]
    talk.say()
    assert [message.role for message in talk.start().request.messages] == ["system", "user"]


AUDIO: Event = {
    "input": {
        "format": {"type": "audio/pcm", "rate": 24000},
        "noise_reduction": {"type": "near_field"},
        "transcription": {"model": "whisper-1", "prompt": "a kitchen"},
        "turn_detection": {"type": "semantic_vad", "eagerness": "low"},
    },
    "output": {"voice": "de", "effects": []},
}


def test_what_a_session_does_not_have_of_its_audio_is_named_and_the_rest_applied() -> None:
    """As agents' libraries send it: their own kind of detection, a model's hint, a voice."""
    talk = Talk(limits=SessionLimits(max_audio_s=1.0, speaks=True, detects_turns=True))
    events = talk.send("session.update", session={"type": "realtime", "instructions": "Be brief.", "audio": AUDIO})
    assert kinds(events) == ["session.updated", "error"]
    audio = events[0]["session"]["audio"]
    assert (audio["input"]["transcription"], audio["output"]["voice"]) == ({"model": "whisper-1"}, "de")
    assert (audio["input"]["turn_detection"], audio["input"]["noise_reduction"]) == (None, None)
    told = error(events[1:])["message"]
    for name in ("input.noise_reduction", "input.transcription.prompt", "input.turn_detection", "output.effects"):
        assert f"`session.audio.{name}`: " in told


def test_a_session_of_text_names_the_audio_and_applies_the_rest() -> None:
    talk = Talk()
    events = talk.send("session.update", session={"instructions": "Be brief.", "audio": AUDIO})
    assert kinds(events) == ["session.updated", "error"]
    assert "audio" not in events[0]["session"]
    told = error(events[1:])["message"]
    assert all(f"`session.audio.{side}`: " in told for side in ("input", "output"))
    talk.say()
    assert [message.role for message in talk.start().request.messages] == ["system", "user"]


def test_a_server_without_detection_applies_the_other_settings_of_the_input() -> None:
    talk = Talk(limits=SessionLimits(max_audio_s=1.0))
    listening = {"transcription": {"language": "en"}, "turn_detection": {"type": "server_vad"}}
    events = talk.send("session.update", session={"audio": {"input": listening}})
    assert kinds(events) == ["session.updated", "error"]
    assert events[0]["session"]["audio"]["input"]["transcription"] == {"model": None}
    assert "turn_detection" in error(events[1:])["message"]


@pytest.mark.parametrize("session", [{"tracing": "auto"}, {"audio": {"input": {"noise_reduction": {}}}}, {"x": {}}])
def test_an_update_of_which_nothing_is_left_only_names_it(session: Event) -> None:
    fault = error(Talk(limits=SessionLimits(max_audio_s=1.0)).send("session.update", session=session))
    assert (fault["code"], "applied" in fault["message"]) == ("unsupported_feature", False)


@pytest.mark.parametrize(
    ("audio", "param"),
    [
        ({"inputs": {}}, "session.audio.inputs"),
        ({"input": {"turn_detections": None, "turn_detectio": {}}}, "session.audio.input.turn_detectio"),
        ({"input": {"turn_detection": {"silence_duration": 5}}}, "session.audio.input.turn_detection.silence_duration"),
        ({"input": {"noise_reduction": {}, "turn_detection": {"threshold": 2}}}, None),
        (7, "session.audio"),
    ],
)
def test_a_misspelt_or_wrong_setting_of_audio_applies_nothing(audio: object, param: str | None) -> None:
    talk = Talk(limits=SessionLimits(max_audio_s=1.0, detects_turns=True))
    fault = error(talk.send("session.update", session={"instructions": "Be brief.", "audio": audio}))
    assert fault["param"] == param or (param is None and fault["param"].startswith("session.audio.input.turn"))
    talk.say()
    assert [message.role for message in talk.start().request.messages] == ["user"]


def test_a_wrong_value_beside_an_unknown_field_applies_nothing() -> None:
    talk = Talk()
    events = talk.send("session.update", session={"instructions": "Be brief.", "tracing": "auto", "temperature": 9})
    assert (kinds(events), error(events)["param"]) == (["error"], "session.temperature")
    talk.say()
    assert [message.role for message in talk.start().request.messages] == ["user"]


def test_tags_of_connection_session_and_response_add_up() -> None:
    talk = Talk(RoutingHints(tags=("kiosk",)))
    talk.send("session.update", session={"causeway": {"tags": ["private"]}})
    talk.say()
    assert talk.start().request.hints.tags == ("kiosk", "private")


def test_a_connection_that_contradicts_the_settings_changes_nothing() -> None:
    talk = Talk()
    talk.send("session.update", session={"type": "realtime", "causeway": {"prefer": "only_on_device"}})
    with pytest.raises(InvalidRequest):
        talk.session.narrow(RoutingHints(prefer="only_cloud", tags=("late",)))
    assert talk.session.request_hints == RoutingHints(prefer="only_on_device")


def test_a_response_adds_its_tags_to_those_of_the_session() -> None:
    talk = Talk()
    talk.send("session.update", session={"causeway": {"tags": ["private"], "prefer": "only_on_device"}})
    talk.say()
    hints = talk.start(causeway={"tags": ["loud"]}).request.hints
    assert (hints.tags, hints.prefer) == (("loud", "private"), "only_on_device")


def test_the_events_of_an_answer_are_those_of_openai_in_its_order() -> None:
    talk = Talk()
    talk.say()
    events = talk.send("response.create", event_id="e")
    assert isinstance(talk.effect, StartResponse)
    response = talk.effect.response
    for text in ("It is ", "noon."):
        response.chunk(Chunk(text=text, tokens=1))
    response.chunk(Chunk(finish_reason="stop"))
    response.chunk(Chunk(usage=Usage(prompt_tokens=5, completion_tokens=2)))
    response.complete()
    events += talk.read()
    assert kinds(events) == [
        "response.created",
        "response.output_item.added",
        "conversation.item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "conversation.item.done",
        "response.done",
    ]
    done = events[-1]["response"]
    assert (done["status"], done["usage"]["total_tokens"]) == ("completed", 7)
    assert done["output"][0]["content"] == [{"type": "output_text", "text": "It is noon."}]
    numbers = [event["sequence_number"] for event in events]
    assert numbers == list(range(numbers[0], numbers[0] + len(events)))
    talk.say("And now?")
    assert [message.role for message in talk.start().request.messages] == ["user", "assistant", "user"]


def test_a_function_call_is_an_item_whose_result_the_client_adds() -> None:
    talk = Talk()
    tool = {"type": "function", "name": "lamp", "parameters": {"type": "object"}}
    talk.send("session.update", session={"tools": [tool], "tool_choice": "required"})
    talk.say()
    response = talk.start().response
    response.chunk(Chunk(tool_calls=(ToolCallDelta(0, '{"on":', "call_1", "lamp"),)))
    response.chunk(Chunk(tool_calls=(ToolCallDelta(0, "true}"),), finish_reason="tool_calls"))
    response.complete()
    events = talk.read()
    assert kinds(events).count("response.function_call_arguments.delta") == 2
    assert events[-1]["response"]["output"][0]["arguments"] == '{"on":true}'
    talk.send("conversation.item.create", item={"type": "function_call_output", "call_id": "call_1", "output": "ok"})
    messages = talk.start().request.messages
    assert [(message.role, len(message.tool_calls)) for message in messages] == [
        ("user", 0),
        ("assistant", 1),
        ("tool", 0),
    ]


def test_an_interrupted_answer_ends_at_once_and_what_comes_later_is_dropped() -> None:
    talk = Talk()
    talk.say()
    response = talk.start().response
    response.chunk(Chunk(text="It is"))
    talk.read()
    events = talk.send("response.cancel", response_id=response.id)
    assert isinstance(talk.effect, CancelResponse)
    done = events[-1]["response"]
    assert (done["status"], done["status_details"]["reason"]) == ("cancelled", "client_cancelled")
    assert (done["output"][0]["status"], done["output"][0]["content"][0]["text"]) == ("incomplete", "It is")
    response.chunk(Chunk(text=" noon", finish_reason="stop"))
    response.complete()
    assert (talk.read(), talk.session.running) == ([], False)
    assert error(talk.send("response.cancel"))["code"] == "response_cancel_not_active"


def test_an_answer_that_breaks_fails_with_what_there_is() -> None:
    talk = Talk()
    talk.say()
    response = talk.start().response
    response.chunk(Chunk(text="It"))
    response.fail(EngineCrashed("the child was killed", phase="stream"))
    done = talk.read()[-1]["response"]
    assert (done["status"], done["status_details"]["error"]["code"]) == ("failed", "engine_crashed")
    response = talk.start().response
    response.complete()  # without a finish reason
    assert talk.read()[-1]["response"]["status_details"]["error"]["code"] == "stream_broken"


def test_an_answer_that_reached_its_limit_is_incomplete() -> None:
    talk = Talk()
    talk.say()
    start = talk.start(max_output_tokens=3)
    assert start.request.max_tokens == 3
    start.response.chunk(Chunk(text="one", finish_reason="length"))
    start.response.complete()
    details = talk.read()[-1]["response"]["status_details"]
    assert details == {"type": "incomplete", "reason": "max_output_tokens"}


def test_one_response_runs_at_a_time() -> None:
    talk = Talk()
    assert error(talk.send("response.create"))["param"] == "response.input"
    talk.say()
    talk.start()
    assert error(talk.send("response.create"))["code"] == "conversation_already_has_active_response"


def test_a_response_out_of_the_conversation_leaves_no_item() -> None:
    talk = Talk()
    talk.say("first", id="mine")
    reference = {"type": "item_reference", "id": "mine"}
    start = talk.start(conversation="none", input=[reference, HELLO], metadata={"topic": "x"})
    assert len(start.request.messages) == 2
    start.response.chunk(Chunk(text="aside", finish_reason="stop"))
    start.response.complete()
    events = talk.read()
    assert not any(kind.startswith("conversation.") for kind in kinds(events))
    assert events[-1]["response"]["metadata"] == {"topic": "x"}
    assert len(talk.start().request.messages) == 1


def test_items_are_inserted_found_and_deleted_by_id() -> None:
    talk = Talk()
    talk.say("b", id="b")
    assert (
        talk.send("conversation.item.create", item=HELLO | {"id": "a"}, previous_item_id="root")[0]["previous_item_id"]
        is None
    )
    assert talk.say("c", id="c")[0]["previous_item_id"] == "b"
    assert error(talk.say("again", id="c"))["param"] == "item.id"
    assert error(talk.send("conversation.item.create", item=HELLO, previous_item_id="nowhere"))["code"] == "not_found"
    assert talk.send("conversation.item.retrieve", item_id="a")[0]["item"]["id"] == "a"
    assert kinds(talk.send("conversation.item.delete", item_id="a")) == ["conversation.item.deleted"]
    assert error(talk.send("conversation.item.retrieve", item_id="a"))["code"] == "not_found"


def test_a_long_conversation_loses_its_oldest_items_and_says_so() -> None:
    talk = Talk(limits=SessionLimits(max_items=2))
    talk.say("1", id="one")
    talk.say("2", id="two")
    events = talk.say("3", id="three")
    assert kinds(events)[-1] == "conversation.item.deleted"
    assert events[-1]["item_id"] == "one"
    response = talk.start().response
    response.chunk(Chunk(text="4", finish_reason="stop"))
    response.complete()
    assert [event["item_id"] for event in talk.read() if event["type"] == "conversation.item.deleted"] == ["two"]


def test_a_conversation_that_may_not_be_shortened_refuses_what_does_not_fit() -> None:
    talk = Talk(limits=SessionLimits(max_items=9, max_bytes=400))
    talk.send("session.update", session={"truncation": "disabled"})
    talk.say("x" * 200)
    assert error(talk.say("y" * 200))["code"] == "conversation_full"
    assert error(Talk(limits=SessionLimits(max_bytes=400)).say("x" * 500))["code"] == "conversation_full"


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (b"", "invalid_json"),
        (b"\xff\xfe", "invalid_json"),
        (b"[]", "invalid_value"),
        (b"{" * 5000, "invalid_json"),
        (b'{"type": 1}', "missing_required_parameter"),
        (b'{"type": "session.update"}', "missing_required_parameter"),
        (b'{"type": "response.create", "typo": 1}', "unknown_parameter"),
        (b'{"type": "session.delete"}', "invalid_value"),
        (b'{"type": "input_audio_buffer.append", "audio": ""}', "unsupported_feature"),
        (b'{"type": "conversation.item.create", "item": {"type": "reasoning"}}', "invalid_value"),
        (
            b'{"type": "conversation.item.create", "item": %b}'
            % b'{"type": "message", "role": "user", "content": [{"type": "input_audio", "audio": ""}]}',
            "unsupported_feature",
        ),
    ],
)
def test_a_wrong_event_is_told_and_changes_nothing(frame: bytes, code: str) -> None:
    talk = Talk()
    assert talk.session.receive(frame) is None
    assert error(talk.read())["code"] == code


@given(st.binary(max_size=200))
def test_any_bytes_are_an_event_or_an_error(frame: bytes) -> None:
    talk = Talk()
    talk.session.receive(frame)
    assert kinds(talk.read()) == ["error"]


def test_a_log_replays_what_the_client_lacks() -> None:
    log = EventLog(replay_bytes=10_000)
    for number in range(10):
        log.append("x", {"n": number})
    first = [log.take() for _ in range(6)]
    log.rewind(4)
    second = [log.take() for _ in range(6)]
    assert second[:2] == first[4:]
    assert log.take() is None
    for after in (3, 11):  # the client said that it has 4
        with pytest.raises(EventsLost):
            log.rewind(after)


def test_a_log_keeps_a_bounded_past_and_every_event_that_waits() -> None:
    log = EventLog(replay_bytes=200)
    for number in range(100):
        log.append("x", {"n": number})
    assert log.unsent_bytes > 5000
    while log.take() is not None:
        pass
    assert log.unsent_bytes == 0
    with pytest.raises(EventsLost):
        log.rewind(90)
    log.rewind(98)
    assert json.loads(log.take() or b"")["sequence_number"] == 99
