"""Tags and restrictions belong to the items of a conversation, and every request that has an item carries them."""

from __future__ import annotations

import base64

import pytest

from causeway_server.router.errors import InvalidRequest
from causeway_server.router.openai.audio import Transcript
from causeway_server.router.realtime.response import SessionLimits, StartResponse, TranscribeAudio
from causeway_server.router.types import Chunk, Prefer, RoutingHints

from .test_session import HELLO, Event, Talk, error

PRIVATE: Event = {"causeway": {"tags": ["private"]}}
STAYS: Event = {"causeway": {"prefer": "only_on_device"}}
SECOND = base64.b64encode(bytes(48_000)).decode()


def answered(talk: Talk, **response: object) -> StartResponse:
    """Start a response, and end it with an answer."""
    started = talk.start(**response)
    started.response.chunk(Chunk(text="hi", finish_reason="stop"))
    started.response.complete()
    talk.read()
    return started


def hints(started: StartResponse) -> tuple[Prefer | None, tuple[str, ...]]:
    return started.request.hints.prefer, started.request.hints.tags


def test_the_turn_after_a_private_one_is_private() -> None:
    talk = Talk()
    talk.say("public")
    assert hints(answered(talk)) == (None, ())
    talk.say("secret")
    answered(talk, causeway={"tags": ["Private"], "prefer": "only_on_device"})
    talk.say("and now?")
    assert hints(answered(talk)) == ("only_on_device", ("private",))
    assert hints(answered(talk, causeway={"tags": ["more"]})) == ("only_on_device", ("more", "private"))


def test_an_answer_about_a_private_item_keeps_its_tags_when_that_is_deleted() -> None:
    talk = Talk()
    talk.say("secret", id="q")
    answered(talk, **PRIVATE)
    talk.send("conversation.item.delete", item_id="q")
    assert hints(answered(talk)) == (None, ("private",))


def test_a_conversation_without_its_private_items_is_free_again() -> None:
    talk = Talk()
    talk.say("secret", id="q")
    started = answered(talk, **PRIVATE)
    for name in ("q", f"item_{started.id}_0"):
        talk.send("conversation.item.delete", item_id=name)
    talk.say("public")
    assert hints(answered(talk)) == (None, ())


def test_a_response_of_its_own_input_carries_the_tags_of_the_items_that_it_names_and_no_others() -> None:
    talk = Talk()
    talk.say("secret", id="q")
    answered(talk, **PRIVATE)
    reference = {"type": "item_reference", "id": "q"}
    assert hints(answered(talk, conversation="none", input=[reference, HELLO])) == (None, ("private",))
    assert hints(answered(talk, conversation="none", input=[{**HELLO, "id": "q"}])) == (None, ())


def test_an_item_of_a_response_alone_marks_no_item_of_the_conversation_with_the_same_id() -> None:
    talk = Talk()
    talk.say("public", id="q")
    answered(talk, conversation="none", input=[{**HELLO, "id": "q"}], **PRIVATE)
    assert hints(answered(talk)) == (None, ())


@pytest.mark.parametrize("end", ["cancel", "fail"])
def test_a_private_turn_without_an_answer_stays_private(end: str) -> None:
    talk = Talk()
    talk.say("secret")
    started = talk.start(**PRIVATE)
    if end == "cancel":
        talk.send("response.cancel")
    else:
        started.response.complete()
    assert hints(answered(talk)) == (None, ("private",))


@pytest.mark.parametrize("wrong", [{"max_output_tokens": -5}, {"prompt": {"id": "p"}}, {"model": "another"}])
@pytest.mark.parametrize(
    ("restriction", "kept"),
    [(PRIVATE, (None, ("private",))), (STAYS, ("only_on_device", ()))],
    ids=["tag", "preference"],
)
def test_a_private_turn_that_is_refused_stays_private(wrong: Event, restriction: Event, kept: object) -> None:
    talk = Talk()
    talk.say("secret")
    error(talk.send("response.create", response={**restriction, **wrong}))
    talk.say("and now?")
    assert hints(answered(talk)) == kept


def test_a_refused_response_of_its_own_input_marks_the_items_that_it_names_alone() -> None:
    talk = Talk()
    talk.say("public", id="p")
    talk.say("secret", id="q")
    own = [{"type": "item_reference", "id": "q"}, HELLO]
    error(talk.send("response.create", response={**PRIVATE, "input": own, "max_output_tokens": -5}))
    references = [[{"type": "item_reference", "id": name}] for name in ("p", "q")]
    assert [hints(answered(talk, conversation="none", input=named))[1] for named in references] == [(), ("private",)]


@pytest.mark.parametrize("causeway", [{"tags": ["a b"]}, {"tags": 5}, "private", {"prefer": "only_cloud"}, None])
def test_a_refused_turn_without_a_valid_restriction_marks_nothing(causeway: object) -> None:
    talk = Talk()
    talk.say()
    error(talk.send("response.create", response={"causeway": causeway, "max_output_tokens": -5}))
    assert hints(answered(talk)) == (None, ())


def test_a_transcript_keeps_the_tags_of_its_audio() -> None:
    talk = Talk(limits=SessionLimits(max_audio_s=10.0))
    talk.send("session.update", session={"audio": {"input": {"transcription": {}}}})
    talk.send("input_audio_buffer.append", audio=SECOND)
    talk.send("input_audio_buffer.commit")
    audio = talk.effect
    assert isinstance(audio, TranscribeAudio)
    answered(talk, **PRIVATE)
    talk.session.transcribed(audio, Transcript("secret", "en", 1.0))
    assert hints(answered(talk)) == (None, ("private",))


def test_a_wish_for_one_turn_binds_no_later_one() -> None:
    talk = Talk()
    talk.say()
    answered(talk, causeway={"prefer": "prefer_cloud"})
    assert hints(answered(talk, causeway={"prefer": "prefer_on_device"})) == ("prefer_on_device", ())


@pytest.mark.parametrize("prefer", ["only_cloud", "prefer_cloud"])
def test_what_contradicts_an_item_is_refused_and_starts_nothing(prefer: str) -> None:
    talk = Talk()
    talk.say()
    answered(talk, **STAYS)
    refused = error(talk.send("response.create", response={"causeway": {"prefer": prefer}}))
    assert (refused["param"], talk.effect) == ("response.causeway.prefer", None)
    assert "an item of its conversation" in refused["message"]
    assert hints(answered(talk)) == ("only_on_device", ())


def test_an_update_only_narrows() -> None:
    talk = Talk()
    talk.send("session.update", session={"causeway": {"prefer": "only_on_device", "tags": ["a"], "deadline_ms": 5000}})
    refused = error(talk.send("session.update", session={"causeway": {"prefer": "only_cloud"}}))
    assert refused["param"] == "session.causeway.prefer"
    (updated,) = talk.send("session.update", session={"causeway": {"tags": ["B"]}})
    assert updated["session"]["causeway"]["tags"] == ["a", "b"]
    talk.send("session.update", session={"causeway": None})
    talk.send("session.update", session={"causeway": {"prefer": "prefer_on_device"}})
    talk.say()
    assert hints(answered(talk)) == ("only_on_device", ("a", "b"))


def numbered(turn: int) -> Event:
    return {"causeway": {"tags": [f"{turn}-{number}" for number in range(32)]}}


def test_the_tags_of_a_session_are_bounded() -> None:
    talk = Talk()
    talk.send("session.update", session=numbered(0))
    refused = error(talk.send("session.update", session=numbered(1)))
    assert refused["param"] == "session.causeway.tags"


def test_the_tags_of_a_conversation_are_bounded_and_deleted_items_make_room() -> None:
    talk = Talk()
    talk.say(id="q")
    made = [answered(talk, **numbered(turn)).id for turn in range(5)]
    refused = error(talk.send("response.create"))
    assert refused["param"] == "response.causeway.tags"
    for name in ("q", *[f"item_{one}_0" for one in made]):
        talk.send("conversation.item.delete", item_id=name)
    talk.say()
    assert hints(answered(talk)) == (None, ())


def test_the_tags_of_connections_that_resume_a_session_are_bounded() -> None:
    talk = Talk()
    for turn in range(4):
        talk.session.narrow(RoutingHints(tags=tuple(numbered(turn)["causeway"]["tags"])))
    with pytest.raises(InvalidRequest):
        talk.session.narrow(RoutingHints(tags=("more",)))
    assert len(talk.session.request_hints.tags) == 128
