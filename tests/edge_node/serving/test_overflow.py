"""`context: {overflow: trim_middle}`: a chat that exceeds the device's context is answered without its oldest turns."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from causeway_server.edge_node.backends.backend import BackendRequest
from causeway_server.models.chat.overflow import NOTE
from causeway_server.router.errors import ContextLengthExceeded
from causeway_server.router.openai.tokens import TokenList
from causeway_server.router.types import Chunk, Request
from tests.e2e.sessions.peer import Event, Peer, done, text_of
from tests.mosquitto import Mosquitto, mosquitto

from ..device import POLICY, Answer, Device, running
from ..jobs.support import PROMPT, accepted, ended
from ..mqtt.peer import mqtt_config, peer_of
from ..scripted import CLOUD_WORDS, EDGE_WORDS, ScriptedEngine

__all__ = ["mosquitto"]

CONTEXT = 60
TRIMS = POLICY + "\ncontext: {overflow: trim_middle}\n"
LONG = [{"role": role, "content": "word " * 8} for _ in range(8) for role in ("user", "assistant")]
BODY: dict[str, Any] = {"messages": [{"role": "system", "content": "rule"}, *LONG, {"role": "user", "content": "last"}]}


class SmallContext(ScriptedEngine):
    """Refuses chats of more words than its context."""

    async def tokenize(self, request: Request, *, adds_special: bool = True) -> TokenList:
        found = await super().tokenize(request, adds_special=adds_special)
        return TokenList(found.count, CONTEXT, found.tokens)

    async def _answer(self, call: BackendRequest) -> AsyncIterator[Chunk]:
        count = (await self.tokenize(call.request)).count
        if count >= CONTEXT:
            raise ContextLengthExceeded(f"the prompt has {count} tokens, this model's context is {CONTEXT}.")
        async for chunk in super()._answer(call):
            yield chunk


@pytest.fixture
async def device(tmp_path: Path) -> AsyncIterator[Device]:
    async with running(tmp_path, engine=SmallContext(), policy=TRIMS) as device:
        yield device


async def told(device: Device, answer: Answer) -> None:
    """The model, the header and the record say how much was left out."""
    assert answer.status == 200, answer.body
    assert int(answer.headers["x-causeway-trimmed"]) == recorded(device)


def recorded(device: Device) -> int:
    """The number of messages that the model was not given, as the newest record has it."""
    asked = device.engine.calls[-1].request.messages
    left_out = len(BODY["messages"]) - len(asked)
    assert (asked[0].content, asked[-1].content) == (f"rule\n\n{NOTE}", "last")
    attempt = device.newest().outcome.attempts[-1]
    assert (attempt.error, attempt.detail) == ("", f"{left_out} messages left out to fit the context")
    return left_out


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_chat_is_answered_without_its_oldest_turns(device: Device, stream: bool) -> None:
    """A model that the client names, so that no other target may answer."""
    answer = await device.ask(model="small", stream=stream, **BODY)
    assert answer.text == "".join(EDGE_WORDS)
    await told(device, answer)


async def test_the_other_dialects_are_trimmed_too(device: Device) -> None:
    system, *messages = BODY["messages"]
    message = {"model": "small", "max_tokens": 9, "system": system["content"], "messages": messages}
    response = {"model": "small", "instructions": system["content"], "input": messages}
    for path, body in (("/v1/messages", message), ("/v1/responses", response)):
        async with device.session.post(path, json=body) as reply:
            await told(device, Answer(reply.status, dict(reply.headers), await reply.read()))


async def test_a_target_with_more_context_answers_first(device: Device) -> None:
    """Nothing is left out where the next target takes the whole chat."""
    answer = await device.ask(**BODY)
    assert answer.text == "".join(CLOUD_WORDS)
    assert "x-causeway-trimmed" not in answer.headers


async def test_a_private_chat_is_trimmed_and_stays(device: Device) -> None:
    answer = await device.ask(tags="private", **BODY)
    assert answer.headers["x-causeway-route"] == "edge"
    await told(device, answer)
    assert device.cloud.bodies == []


async def test_a_trimmed_answer_is_not_cached(device: Device) -> None:
    """A hit could not say that it is of another chat."""
    for _ in range(2):
        answer = await device.ask(model="small", temperature=0, **BODY)
        assert answer.headers["x-causeway-cache"] == "miss"
        await told(device, answer)


async def test_what_cannot_be_trimmed_is_refused_as_before(device: Device) -> None:
    answer = await device.ask(model="small", messages=[{"role": "user", "content": "word " * 80}])
    assert (answer.status, answer.code) == (400, "context_length_exceeded")


async def test_refuse_is_the_default(tmp_path: Path) -> None:
    async with running(tmp_path, engine=SmallContext()) as device:
        answer = await device.ask(model="small", **BODY)
        assert (answer.status, answer.code) == (400, "context_length_exceeded")


async def test_a_job_is_trimmed(tmp_path: Path) -> None:
    async with running(tmp_path, engine=SmallContext(), policy=TRIMS, jobs=PROMPT) as device:
        job = await ended(device, await accepted(device, **BODY, model="small"))
        assert job["result"]["choices"][0]["message"]["content"] == "".join(EDGE_WORDS)
        assert recorded(device) > 0


async def ask_at_length(peer: Peer) -> list[Event]:
    """Ask in a live session what BODY asks; return the events of the answer."""
    await peer.send("session.update", session={"type": "realtime", "instructions": "rule"})
    for message in LONG:
        kind = "input_text" if message["role"] == "user" else "output_text"
        content = [{"type": kind, "text": message["content"]}]
        item: Event = {"type": "message", "role": message["role"], "content": content}
        await peer.send("conversation.item.create", item=item)
    return await peer.ask("last")


async def test_a_live_session_is_trimmed(device: Device) -> None:
    peer = await Peer.connect(device.app.port, "model=small")
    events = await ask_at_length(peer)
    assert (text_of(events), done(events)["status"]) == ("".join(EDGE_WORDS), "completed")
    assert recorded(device) > 0
    peer.cut()


@pytest.mark.mosquitto
@pytest.mark.slow
async def test_a_message_of_a_broker_is_trimmed(mosquitto: Mosquitto, tmp_path: Path) -> None:
    mosquitto.start()
    mqtt = mqtt_config(mosquitto.port)
    async with running(tmp_path, engine=SmallContext(), policy=TRIMS, jobs=PROMPT, mqtt=mqtt) as device:
        with peer_of(mosquitto) as peer:
            await peer.state("online")
            peer.ask(json.dumps({**BODY, "model": "small"}).encode())
            assert (await peer.answer()).text == "".join(EDGE_WORDS)
            assert recorded(device) > 0
