"""Every way into a gateway, with every action of the guard: what its tier gets, and what the caller gets."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from grpc import aio

from causeway_server.cloud_pool.config import Flags, load_config
from causeway_server.cloud_pool.core.request_context import AnswerHead
from causeway_server.cloud_pool.degradation.tier_attempt import TierRuntime
from causeway_server.cloud_pool.grpc_api.messages import compiled
from causeway_server.cloud_pool.http.config import GrpcConfig
from causeway_server.cloud_pool.parts.request_parts import RequestParts
from causeway_server.cloud_pool.serving.guard import GUARD_HEADER, GatewayGuard, GuardConfig
from causeway_server.cloud_pool.tiers.config import PartsConfig, TierConfig
from causeway_server.cloud_pool.tiers.tier import ChatFormat, Tier
from causeway_server.models.parts.graph.branch import PartMemory, ReadPart
from causeway_server.models.parts.process.messages import Found
from causeway_server.router.errors import ConfigError, GuardRefused
from causeway_server.router.policy.file import GuardRuleDoc
from causeway_server.router.types import AudioPart, Fact, Message, Request, Transcripts
from tests.cloud_pool.degradation.scripted import Bed, ScriptedTriton
from tests.cloud_pool.grpc_api.served import Client, chat
from tests.cloud_pool.grpc_api.served import text_of as grpc_text
from tests.cloud_pool.upstreams.http_gateway import Gateway, http_tier, serving
from tests.e2e.sessions.peer import Peer, done, text_of
from tests.edge_node.device import Answer
from tests.edge_node.echoing import EchoCloud
from tests.edge_node.guard.test_doors import MAIL, MASKED, SECRET, TOOLS
from tests.edge_node.scripted import ScriptedCloud

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}


class Said(NamedTuple):
    text: str = ""
    code: str = ""


def rules(action: str, when: str = "pii.count > 1") -> GuardConfig:
    return GuardConfig(rules=(GuardRuleDoc(name="personal", action=action, when=when),))  # type: ignore[arg-type]


@asynccontextmanager
async def guarded(folder: Path, guard: GuardConfig, **sections: Any) -> AsyncIterator[tuple[Gateway, EchoCloud]]:
    cloud = EchoCloud()
    await cloud.start()
    try:
        async with serving(folder, http_tier(cloud.url), guard=guard, **sections) as gateway:
            yield gateway, cloud
    finally:
        await cloud.stop()


Door = Callable[[Gateway], Awaitable[Said]]


def post(path: str, body: dict[str, object], text: Callable[[Answer], str]) -> Door:
    async def ask(gateway: Gateway) -> Said:
        answer = await gateway.post(path, {"model": "large", **body})
        if answer.status == 200:
            return Said(text(answer))
        error = answer.json["error"]
        return Said(code=error["code"] if "code" in error else error["details"]["error_code"])  # Anthropic's

    return ask


def _call(answer: Answer) -> str:
    return str(json.loads(answer.json["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"])["say"])


def _called(answer: Answer) -> str:
    deltas = [event["choices"][0]["delta"] for event in answer.events if event["choices"]]
    calls = [one for delta in deltas for one in delta.get("tool_calls", ())]
    return str(json.loads("".join(one["function"].get("arguments", "") for one in calls))["say"])


async def session(gateway: Gateway) -> Said:
    peer = await Peer.connect(int(gateway.app.url.rpartition(":")[2].split("/")[0]), "model=large")
    await peer.event()
    events = await peer.ask(SECRET)
    peer.cut()
    response = done(events)
    return (
        Said(text_of(events))
        if response["status"] == "completed"
        else Said(code=response["status_details"]["error"]["code"])
    )


async def grpc(gateway: Gateway) -> Said:
    assert gateway.app.grpc is not None
    async with aio.insecure_channel(f"127.0.0.1:{gateway.app.grpc.port}") as channel:
        client = Client(channel)
        call = client.call(chat(SECRET, model="large"))
        try:
            return Said(grpc_text([output async for output in call]))
        except aio.AioRpcError as error:
            body = dict(error.trailing_metadata() or ())["x-causeway-error-bin"]
            return Said(code=msgspec.json.decode(body)["error"]["code"])


MESSAGES: dict[str, object] = {"messages": [{"role": "user", "content": SECRET}]}
DOORS: dict[str, Door] = {
    "chat": post("/chat/completions", MESSAGES, lambda one: one.text),
    "chat, streamed": post("/chat/completions", {**MESSAGES, "stream": True}, lambda one: one.text),
    "a call": post("/chat/completions", {**MESSAGES, "tools": TOOLS}, _call),
    "a call, streamed": post("/chat/completions", {**MESSAGES, "stream": True, "tools": TOOLS}, _called),
    "completion, streamed": post(
        "/completions",
        {"prompt": SECRET, "stream": True},
        lambda one: "".join(choice["text"] for event in one.events for choice in event["choices"]),
    ),
    "response, streamed": post(
        "/responses",
        {"input": SECRET, "stream": True},
        lambda one: "".join(event["delta"] for event in one.events if event["type"] == "response.output_text.delta"),
    ),
    "message, streamed": post(
        "/messages",
        {"max_tokens": 99, "stream": True, **MESSAGES},
        lambda one: "".join(event["delta"].get("text", "") for event in one.events if "delta" in event),
    ),
    "completion": post("/completions", {"prompt": SECRET}, lambda one: str(one.json["choices"][0]["text"])),
    "response": post("/responses", {"input": SECRET}, lambda one: str(one.json["output"][-1]["content"][0]["text"])),
    "message": post("/messages", {"max_tokens": 99, **MESSAGES}, lambda one: str(one.json["content"][0]["text"])),
    "embedding": post("/embeddings", {"input": SECRET}, lambda one: str(one.json["data"][0]["embedding"])),
    "compaction": post("/responses/compact", {"input": SECRET}, lambda one: str(one.json["output"])),
    "live session": session,
    "gRPC": grpc,
}
COUNTS = ("/tokenize", "/messages/count_tokens")
PATHS: dict[str, tuple[str, ...]] = {
    "/v1/chat/completions": ("chat", "chat, streamed", "a call", "a call, streamed"),
    "/v1/completions": ("completion", "completion, streamed"),
    "/v1/responses": ("response", "response, streamed"),
    "/v1/responses/compact": ("compaction",),
    "/v1/messages": ("message", "message, streamed"),
    "/v1/embeddings": ("embedding",),
    "/v1/realtime": ("live session",),
}
# Jobs and batches run as chats do (`tests.cloud_pool.streams.test_guard`), parts of chats are in `parts.test_parts`,
# and a transcript is its caller's alone.
ELSEWHERE = {"/v1/jobs", "/v1/batches", "/v1/files", "/v1/audio/transcriptions", "/v1/detokenize"}
STAYS = {
    "/v1/feedback", "/v1/webhooks/secret",
    "/v1/jobs/{id}/retry", "/v1/responses/{id}/cancel", "/v1/batches/{id}/cancel",
    "/v1/conversations", "/v1/conversations/{id}", "/v1/conversations/{id}/items",
}  # fmt: skip
FORMAT = ChatFormat("{% for m in messages %}{{ m.content }}{% endfor %}|", context_tokens=1000)
ACTIONS = ("refuse", "audit", "mask")


def check(action: str, said: Said, cloud: EchoCloud, audit: Mapping[str, object], *, vector: bool = False) -> None:
    asked = cloud.asked
    assert audit["outcome"] == ("guard_refused" if action == "refuse" else "ok")
    if action == "refuse":
        assert said == Said(code="guard_refused")
        assert cloud.bodies == []
        return
    assert (MAIL in asked, "<EMAIL_1>" in asked) == (action == "audit", action == "mask")
    assert vector or said.text == SECRET
    assert audit["guard"] == f"personal={action}"


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("door", DOORS)
async def test_every_door_has_every_action(tmp_path: Path, door: str, action: str) -> None:
    async with guarded(tmp_path, rules(action), grpc=GrpcConfig(port=0)) as (gateway, cloud):
        said = await DOORS[door](gateway)
    check(action, said, cloud, gateway.audit[-1], vector=door in ("embedding", "compaction"))


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("path", COUNTS)
async def test_a_tokenizer_of_a_tiers_server_is_a_door_too(tmp_path: Path, path: str, action: str) -> None:
    async with guarded(tmp_path, rules(action)) as (gateway, cloud):
        answer = await gateway.post(path, {"model": "large", **MESSAGES})
        assert answer.status == (400 if action == "refuse" else 200), answer.body
        assert (MAIL in cloud.asked, "<EMAIL_1>" in cloud.asked) == (action == "audit", action == "mask")


def check_paths(paths: Mapping[str, str]) -> None:
    """Every path of a gateway is a door of a table, or sends nothing to a tier."""
    served = {path for path, methods in paths.items() if "POST" in methods} | {"/v1/realtime"}
    assert served <= PATHS.keys() | ELSEWHERE | STAYS | {f"/v1{path}" for path in COUNTS}, sorted(served)
    assert PATHS.keys() <= served


async def test_every_path_of_a_gateway_is_a_door_or_sends_nothing(tmp_path: Path) -> None:
    async with guarded(tmp_path, GuardConfig()) as (gateway, _):
        check_paths(gateway.app.paths)
    assert DOORS.keys() == {"gRPC", *(door for doors in PATHS.values() for door in doors)}
    assert [method.name for method in compiled().service[0].method] == ["Generate"]


async def test_without_rules_requests_pass_as_they_are(tmp_path: Path) -> None:
    async with guarded(tmp_path, GuardConfig()) as (gateway, cloud):
        answer = await gateway.ask(messages=MESSAGES["messages"])
        assert answer.text == SECRET
        assert "x-causeway-guard" not in answer.headers
        assert MAIL in cloud.asked


async def test_a_part_that_a_tier_would_get_unread_counts_as_a_hit(tmp_path: Path) -> None:
    cloud = await ScriptedCloud().start()
    tier = http_tier(cloud.url, can=("chat", "image"))
    seen = [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, IMAGE]}]
    for number, (guard, status) in enumerate(
        [
            (rules("refuse", "pii.count > 0"), 400),
            (rules("mask", "pii.count > 0"), 503),
            (msgspec.structs.replace(rules("mask", "pii.count > 0"), on_failure="clean"), 200),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        async with serving(folder, tier, guard=guard) as gateway:
            assert (await gateway.ask(messages=seen)).status == status
    assert len(cloud.bodies) == 1
    await cloud.stop()


async def test_conditions_may_name_tags(tmp_path: Path) -> None:
    when = 'pii.count > 0 && "eu" in request.tags'
    async with guarded(tmp_path, rules("mask", when)) as (gateway, cloud):
        await gateway.ask(messages=MESSAGES["messages"])
        await gateway.ask(messages=MESSAGES["messages"], headers={"x-causeway-tags": "EU"})
        contents = [body["messages"][-1]["content"] for body in cloud.bodies]  # type: ignore[index]
        assert contents == [SECRET, MASKED]


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        ("{name: a, action: mask, when: device.cpu > 0.5}", "A gateway does not know `device.cpu`"),
        ("{name: a, action: mask, when: pii.counts > 0}", "Unknown signal `pii.counts`"),
        ("{name: a, action: keep}", "Invalid enum value 'keep'"),
    ],
)
def test_a_rule_that_a_gateway_cannot_follow_is_refused_by_its_line(tmp_path: Path, rule: str, problem: str) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(f"guard:\n  rules:\n    - {rule}\n")
    with pytest.raises(ConfigError) as raised:
        load_config(path, Flags())
    assert problem in str(raised.value)
    assert "gateway.yaml:3" in str(raised.value)


@pytest.mark.parametrize("transcripts", ["written", "spoken"])
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("said", ["Pay with my card 4111 1111 1111 1111.", "Pay with 4111, 1111, 1111, 1111."])
async def test_a_spoken_card_number_has_every_action(said: str, action: str, transcripts: Transcripts) -> None:
    """Where a model reads transcripts in their spoken form, the number is words."""
    large, clip = ScriptedTriton("thanks"), b"RIFF"
    bed, speech = Bed({"large": large, "speech": ScriptedTriton()}), TierConfig("speech", can=("audio",))
    runtimes = dict(bed.service.runtimes)
    for name, tier in (
        ("large", Tier(bed.tiers["large"].config, msgspec.structs.replace(FORMAT, transcripts=transcripts))),
        ("speech", Tier(speech, FORMAT)),
    ):
        runtimes[name] = TierRuntime(tier, bed.admissions[name], bed.tritons[name])
    parts = RequestParts(runtimes, bed.fallback, PartsConfig(), lambda _: False)
    service = msgspec.structs.replace(bed.service, runtimes=runtimes, parts=parts)
    memory = PartMemory(1)
    memory.keep("audio", hashlib.sha256(clip).hexdigest(), ReadPart(Found(Fact(said, 0.9, "en"))))
    part = AudioPart(base64.b64encode(clip).decode(), "wav")
    context = bed.call(Request(kind="chat", model="large", messages=(Message("user", (part,)),)))
    context = msgspec.structs.replace(context, tier=runtimes["large"].tier, memory=memory)
    config = rules(action, "pii.count > 0")
    answer = GatewayGuard(config, config.compiled()).around(service.answer)
    if action == "refuse":
        with pytest.raises(GuardRefused):
            [piece async for piece in answer(context)]
        assert large.requests == []
        return
    head, *_ = [piece async for piece in answer(context)]
    assert isinstance(head, AnswerHead)
    assert head.header(GUARD_HEADER) == f"personal={action}"
    sent = str(large.requests[0].prompt)
    if action == "mask":
        assert "<CARD_1>" in sent
        assert "1111" not in sent
    else:
        assert sent.startswith(said if transcripts == "written" else "pay with")
