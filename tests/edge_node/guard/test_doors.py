"""Every way into a device, with every action of the guard: what its cloud gets, and what the client gets."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from causeway_server.models.parts.process.messages import WorkerSpec
from causeway_server.router.types import Modality
from tests.e2e.sessions.peer import Peer, done, text_of
from tests.models.parts.test_files import ALL, file
from tests.mosquitto import Mosquitto

from ..device import POLICY, Answer, Device, running
from ..echoing import EchoCloud
from ..jobs.support import PROMPT, ended, request, submit
from ..jobs.support import text_of as job_text
from ..mqtt.peer import mqtt_config, peer_of
from ..parts.test_fusion import PATIENT, audio, encoder, image

MAIL, PHONE = "anna@example.org", "+49 151 23456789"
SECRET = f"Write to {MAIL} or {PHONE}, please."
MASKED = "Write to <EMAIL_1> or <PHONE_1>, please."
_RULE = "guard: {{rules: [{{name: personal, action: {}, when: pii.count > 1}}]}}"
RULES = {
    "keep": ("constraints:\n", "constraints:\n  - {name: personal, keep: on_device, when: pii.count > 0}\n"),
    **{action: ("routes:\n", f"{_RULE.format(action)}\nroutes:\n") for action in ("refuse", "audit", "mask")},
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
READERS: dict[Modality, WorkerSpec] = {"audio": encoder(SECRET), "image": encoder(SECRET), "file": ALL["file"]}


class Said(NamedTuple):
    """What a client got: an answer's text, or an error's code."""

    text: str = ""
    code: str = ""


Door = Callable[[Device], Awaitable[Said]]
TAGS = {"x-causeway-tags": "cloud"}


def _said(answer: Answer, text: Callable[[Answer], str]) -> Said:
    if answer.status == 200:
        return Said(text(answer))
    error = answer.json["error"]
    return Said(code=error["code"] if "code" in error else error["details"]["error_code"])  # Anthropic's


def _events(answer: Answer, *path: str) -> str:
    """Join what each event of a stream has at a path."""
    pieces = []
    for event in answer.events:
        found: Any = event
        for key in path:
            found = found.get(key, {}) if isinstance(found, dict) else {}
        pieces.append(found if isinstance(found, str) else "")
    return "".join(pieces)


def chat(*content: dict[str, object], **body: Any) -> Door:
    async def ask(device: Device) -> Said:
        messages = [{"role": "user", "content": list(content) or SECRET}]
        return _said(await device.ask(tags="cloud", messages=messages, **body), lambda answer: answer.text)

    return ask


def call(*, stream: bool) -> Door:
    async def ask(device: Device) -> Said:
        answer = await device.ask(SECRET, tags="cloud", tools=TOOLS, stream=stream)
        return _said(answer, streamed if stream else whole)

    def whole(answer: Answer) -> str:
        calls = answer.json["choices"][0]["message"].get("tool_calls")  # the scripted engine calls nothing
        return str(json.loads(calls[0]["function"]["arguments"])["say"]) if calls else ""

    def streamed(answer: Answer) -> str:
        deltas = [event["choices"][0]["delta"] for event in answer.events if event["choices"]]
        calls = [one for delta in deltas for one in delta.get("tool_calls", ())]
        return str(json.loads("".join(one["function"].get("arguments", "") for one in calls))["say"]) if calls else ""

    return ask


def post(path: str, body: dict[str, object], text: Callable[[Answer], str]) -> Door:
    async def ask(device: Device) -> Said:
        return _said(await request(device, "POST", path, {"model": "auto", **body}, TAGS), text)

    return ask


async def job(device: Device) -> Said:
    answer = await submit(device, SECRET, tags="cloud")
    if answer.status != 202:
        return Said(code=answer.code)
    found = await ended(device, answer.json["id"])
    return Said(job_text(found)) if found["status"] == "succeeded" else Said(code=found["error"]["code"])


async def session(device: Device) -> Said:
    peer = await Peer.connect(device.app.port, "model=auto", headers=TAGS)
    await peer.event()
    events = await peer.ask(SECRET)
    peer.cut()
    response = done(events)
    return (
        Said(text_of(events))
        if response["status"] == "completed"
        else Said(code=response["status_details"]["error"]["code"])
    )


DOORS: dict[str, Door] = {
    "chat": chat(),
    "chat, streamed": chat(stream=True),
    "a call": call(stream=False),
    "a call, streamed": call(stream=True),
    "completion": post("/v1/completions", {"prompt": SECRET}, lambda one: str(one.json["choices"][0]["text"])),
    "completion, streamed": post(
        "/v1/completions",
        {"prompt": SECRET, "stream": True},
        lambda one: "".join(choice["text"] for event in one.events for choice in event["choices"]),
    ),
    "response": post("/v1/responses", {"input": SECRET}, lambda one: str(one.json["output"][-1]["content"][0]["text"])),
    "response, streamed": post(
        "/v1/responses",
        {"input": SECRET, "stream": True},
        lambda one: "".join(event["delta"] for event in one.events if event["type"] == "response.output_text.delta"),
    ),
    "compaction": post("/v1/responses/compact", {"input": SECRET}, lambda one: str(one.json["output"])),
    "message": post(
        "/v1/messages",
        {"max_tokens": 99, "messages": [{"role": "user", "content": SECRET}]},
        lambda one: str(one.json["content"][0]["text"]),
    ),
    "message, streamed": post(
        "/v1/messages",
        {"max_tokens": 99, "messages": [{"role": "user", "content": SECRET}], "stream": True},
        lambda one: _events(one, "delta", "text"),
    ),
    "embedding": post("/v1/embeddings", {"input": SECRET}, lambda one: str(one.json["data"][0]["embedding"])),
    "transcript": chat(audio()),
    "text of an image": chat({"type": "text", "text": "What is it?"}, image()),
    "text file": chat({"type": "text", "text": "What is it?"}, file(SECRET)),
    "job": job,
    "live session": session,
}
PATHS: dict[str, tuple[str, ...]] = {
    "/v1/chat/completions": (
        "chat", "chat, streamed", "a call", "a call, streamed", "transcript", "text of an image", "text file",
    ),
    "/v1/completions": ("completion", "completion, streamed"),
    "/v1/responses": ("response", "response, streamed"),
    "/v1/responses/compact": ("compaction",),
    "/v1/messages": ("message", "message, streamed"),
    "/v1/embeddings": ("embedding",),
    "/v1/jobs": ("job",),
    "/v1/realtime": ("live session",),
}  # fmt: skip
STAYS = {  # on this device
    "/v1/messages/count_tokens", "/v1/tokenize", "/v1/detokenize", "/v1/route", "/v1/feedback", "/console/what-if",
    "/console/policy",
    "/v1/audio/transcriptions", "/v1/audio/speech", "/v1/webhooks/secret",
    "/v1/jobs/{id}/retry", "/v1/jobs/{id}/purge", "/v1/responses/{id}/cancel",
    # Its texts leave with a response that names them.
    "/v1/files", "/v1/conversations", "/v1/conversations/{id}", "/v1/conversations/{id}/items",
}  # fmt: skip
WITH_PARTS = {"transcript", "text of an image", "text file"}
SLOW = {*WITH_PARTS, "job"}


def policy(action: str) -> str:
    text = POLICY.replace(*RULES[action])
    assert text != POLICY
    return text


def check(action: str, said: Said, device: Device, cloud: EchoCloud, *, vector: bool = False) -> None:
    """What the cloud got, and what the client."""
    asked = cloud.asked
    if action == "refuse":
        assert said == Said(code="guard_refused")
        assert MAIL not in asked
        assert not device.engine.calls
    elif action == "keep":
        assert MAIL not in asked
        assert "<EMAIL_1>" not in asked
        assert len(device.engine.calls) == 1
        assert not said.code
    else:
        assert (MAIL in asked, "<EMAIL_1>" in asked) == (action == "audit", action == "mask")
        assert vector or said.text.strip("[]\n").endswith(SECRET) or SECRET in said.text, said
        decision = device.newest().decision
        assert decision is not None
        assert [(one.rule, one.detail) for one in decision.reasons if one.code == "guard_held"] == [
            ("personal", action)
        ]


@pytest.mark.parametrize("action", RULES)
@pytest.mark.parametrize("door", [pytest.param(door, marks=[pytest.mark.slow] * (door in SLOW)) for door in DOORS])
async def test_every_door_has_every_action(tmp_path: Path, door: str, action: str) -> None:
    cloud = EchoCloud()
    readers = READERS if door in WITH_PARTS else None
    async with running(
        tmp_path, policy=policy(action), cloud=cloud, encoders=readers, parts=PATIENT, jobs=PROMPT
    ) as device:
        said = await DOORS[door](device)
        check(action, said, device, cloud, vector=door in ("embedding", "compaction"))


async def test_every_path_of_a_device_is_a_door_or_sends_nothing(tmp_path: Path) -> None:
    async with running(tmp_path, cloud=EchoCloud(), jobs=PROMPT) as device:
        served = {path for path, methods in device.app.api.paths.items() if "POST" in methods}
    assert served | {"/v1/realtime"} == PATHS.keys() | STAYS
    assert DOORS.keys() == {door for doors in PATHS.values() for door in doors}


@pytest.mark.mosquitto
@pytest.mark.slow
@pytest.mark.parametrize("action", RULES)
async def test_a_message_of_a_broker_has_every_action(tmp_path: Path, mosquitto: Mosquitto, action: str) -> None:
    mosquitto.start()
    cloud = EchoCloud()
    async with running(
        tmp_path, policy=policy(action), cloud=cloud, jobs=PROMPT, mqtt=mqtt_config(mosquitto.port, tags=("cloud",))
    ) as device:
        with peer_of(mosquitto) as peer:
            await peer.state("online")
            peer.ask(SECRET)
            answer = await peer.answer()
            is_error = "error" in json.loads(answer.payload)
            said = Said(code=answer.code) if is_error else Said(answer.text)
        check(action, said, device, cloud)


async def test_a_clean_request_passes_as_it_is(tmp_path: Path) -> None:
    cloud = EchoCloud()
    async with running(tmp_path, policy=policy("mask"), cloud=cloud) as device:
        answer = await device.ask("The meeting is on 12.03.2024.", tags="cloud")
        assert answer.text == "The meeting is on 12.03.2024."
        assert (await device.record(answer)).estimates.pii_count == 0


async def test_a_part_that_no_encoder_reads_stays_on_the_device(tmp_path: Path) -> None:
    """A cloud that takes images would get it unread."""
    sees = policy("keep").replace("can: [chat, completion, embedding, tools, json, logprobs]\nconstraints",
                                  "can: [chat, image]\nconstraints")  # fmt: skip
    cloud = EchoCloud()
    async with running(tmp_path, policy=sees, cloud=cloud) as device:
        answer = await device.ask(tags="cloud", messages=[{"role": "user", "content": [image()]}])
        assert answer.status in (400, 503)
        assert cloud.bodies == []
        free = sees.replace("routes:\n", "guard: {on_failure: clean}\nroutes:\n", 1)
    async with running(tmp_path / "clean", policy=free, cloud=(cloud := EchoCloud())) as device:
        assert (await device.ask(tags="cloud", messages=[{"role": "user", "content": [image()]}])).status == 200
        assert len(cloud.bodies) == 1


async def test_a_masked_conversation_continues_with_its_placeholders(tmp_path: Path) -> None:
    cloud = EchoCloud()
    async with running(tmp_path, policy=policy("mask"), cloud=cloud) as device:
        first = await device.ask(SECRET, tags="cloud")
        history = [{"role": "user", "content": SECRET}, {"role": "assistant", "content": first.text}]
        await device.ask(tags="cloud", messages=[*history, {"role": "user", "content": f"And b@example.org? {MAIL}"}])
        contents = [message["content"] for message in cloud.bodies[-1]["messages"]]  # type: ignore[attr-defined]
        assert contents == [MASKED, MASKED, "And <EMAIL_2>? <EMAIL_1>"]


async def test_a_cached_answer_has_its_values(tmp_path: Path) -> None:
    cloud = EchoCloud()
    async with running(tmp_path, policy=policy("mask"), cloud=cloud) as device:
        answers = [await device.ask(SECRET, tags="cloud", temperature=0.0) for _ in range(2)]
        assert [answer.text for answer in answers] == [SECRET, SECRET]
        assert answers[1].headers["x-causeway-cache"] == "hit"
        assert len(cloud.bodies) == 1


async def test_the_device_itself_gets_the_values(tmp_path: Path) -> None:
    async with running(tmp_path, policy=policy("mask"), cloud=EchoCloud()) as device:
        await device.ask(SECRET, tags="edge")
        assert device.engine.calls[-1].request.messages[-1].content == SECRET


async def test_a_cloud_that_dies_leaves_the_masked_request_to_the_device(tmp_path: Path) -> None:
    cloud = EchoCloud()
    async with running(tmp_path, policy=policy("mask"), cloud=cloud) as device:
        await cloud.stop()
        answer = await device.ask(SECRET, tags="cloud", stream=True)
        assert answer.headers["x-causeway-target"] == "small"
        assert device.engine.calls[-1].request.messages[-1].content == SECRET
        device.assert_nothing_leaks()


CARD = "4111 1111 1111 1111"


@pytest.mark.slow
@pytest.mark.parametrize("action", RULES)
@pytest.mark.parametrize("said", [f"Pay with my card {CARD}.", "Pay with 4111, 1111, 1111, 1111."])
async def test_a_spoken_card_number_has_every_action(tmp_path: Path, said: str, action: str) -> None:
    """Both models read transcripts in their spoken form, in which the number is words."""
    text = policy(action).replace("m-small", "assistant").replace("m-large", "assistant-large")
    cloud = EchoCloud()
    async with running(
        tmp_path,
        policy=text.replace("pii.count > 1", "pii.count > 0"),
        cloud=cloud,
        encoders={"audio": encoder(said)},
        parts=PATIENT,
    ) as device:
        answer = await chat(audio())(device)
        assert device.newest().estimates.pii_count == 1
        if action == "audit":  # as that model reads it
            assert "forty one eleven" in cloud.asked
        elif action == "mask":
            assert "<CARD_1>" in cloud.asked
            assert "1111" not in cloud.asked
        else:
            assert cloud.bodies == []
            assert (answer.code == "guard_refused") == (action == "refuse")
