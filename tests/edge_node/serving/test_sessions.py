"""Sessions at a daemon: tool loops, private items and restarts, in each dialect and as jobs."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from causeway_server.edge_node.config.schema import CloudServer
from causeway_server.edge_node.storage.sessions import SessionStore
from causeway_server.router.decision.sessions import KEY_BYTES
from causeway_server.router.types import Session
from tests.bed.agents import KINDS, POLICY, SECRET, Agent, AgentCloud, AgentEngine, Kind, Scripts

from ..device import Device, running

LOOP = POLICY + "session: {pin: tool_loop, mode: MODE}\n"


@asynccontextmanager
async def bed(folder: Path, policy: str = LOOP, *, mode: str = "require") -> AsyncIterator[tuple[Device, Scripts]]:
    """A device with its model and two clouds, which do as the client's words say."""
    scripts = Scripts(1, faults=False)
    clouds = [AgentCloud(scripts), AgentCloud(scripts)]
    for cloud in clouds:
        await cloud.start()
    names = {name: CloudServer(url=cloud.url) for name, cloud in zip("ab", clouds, strict=True)}
    policy, engine = policy.replace("MODE", mode), AgentEngine(scripts)
    async with running(folder, policy=policy, engine=engine, cloud=clouds[0], clouds=names) as device:
        yield device, scripts
    await clouds[1].stop()


def agent(kind: Kind = "history", number: int = 0) -> Agent:
    return Agent(kind, number, random.Random(number))


async def turn(device: Device, one: Agent, words: str = "task tools=0", tags: str = "") -> str:
    """One turn; returns the target that answered, or the error's code."""
    one.say(words)
    status, how = await one.ask(device.session, tags)
    for _ in range(12):
        await asyncio.sleep(0)
    return device.newest().outcome.target if status == 200 else how


@pytest.mark.parametrize("kind", KINDS)
async def test_a_tool_loop_stays_where_it_began(tmp_path: Path, kind: Kind) -> None:
    """The routes differ from turn to turn; only the user's next words follow them again."""
    async with bed(tmp_path) as (device, scripts):
        one = agent(kind)
        targets = [await turn(device, one, "task tools=2", tags) for tags in ("hard", "", "hot")]
        assert targets == ["large"] * 3
        sessions = [record.outcome.session for record in device.parts.decisions.memory.values()]
        assert [each.status for each in sessions if each is not None] == ["new", "stayed", "stayed"]
        one.call_id = ""
        assert await turn(device, one, "task tools=0") == "small"
        session = device.newest().outcome.session
        assert session is not None
        assert session.header == "switched; from=large; reason=otherwise"
        assert session.lost_tokens == 12
        assert scripts.foreign == []


async def test_without_session_the_same_loop_hops(tmp_path: Path) -> None:
    """The instrument sees it, and answers have no header."""
    async with bed(tmp_path, POLICY) as (device, scripts):
        one = agent()
        targets = [await turn(device, one, "task tools=2", tags) for tags in ("hard", "", "hot")]
        assert targets == ["large", "small", "medium"]
        assert scripts.foreign == ["m-large.1", "m-small.2"]
        assert device.newest().outcome.session is None
        assert device.newest().estimates.session is None


@pytest.mark.parametrize(("kind", "shape"), [("named", "code"), ("messages", "type"), ("chain", "code")])
async def test_require_names_the_target_that_is_gone(tmp_path: Path, kind: Kind, shape: str) -> None:
    """In the error shape of each dialect; and the loop goes on once it is back."""
    async with bed(tmp_path) as (device, scripts):
        one = agent(kind)
        assert await turn(device, one, "task tools=1", "hard") == "large"
        one.say("")
        headers: dict[str, str] = {}
        path, body = one.request(headers, stream=False)
        device.cloud.status = 500
        async with device.session.post(path, json=body, headers=headers) as response:
            error = (await response.json())["error"]
            assert response.status == 503
        assert error[shape] == ("session_target_unavailable" if shape == "code" else "api_error")
        assert "The session stays at `large`" in error["message"]
        device.cloud.status = 200
        status, how = await one.ask(device.session, "")
        assert (status, how) == (200, "stayed")
        assert scripts.foreign == []


async def test_prefer_goes_on_and_says_so(tmp_path: Path) -> None:
    async with bed(tmp_path, mode="prefer") as (device, scripts):
        one = agent()
        assert await turn(device, one, "task tools=1", "hard") == "large"
        device.cloud.status = 500
        assert await turn(device, one) == "small"
        session = device.newest().outcome.session
        assert session is not None
        assert session.header.startswith("switched; from=large; reason=fallback: ")
        assert scripts.foreign == ["m-large.1"]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_private_item_binds_the_rest_of_the_session(tmp_path: Path, kind: Kind) -> None:
    """Untagged turns that a route sends to the cloud stay, and so do their records say."""
    async with bed(tmp_path, mode="prefer") as (device, scripts):
        one = agent(kind)
        assert await turn(device, one, "task tools=0", "hard") == "large"
        assert await turn(device, one, f"{SECRET} tools=1", "private,hard") == "small"
        for tags in ("hard", "hot", ""):
            assert await turn(device, one, "task tools=0", tags) == "small"
        decision = device.newest().decision
        assert decision is not None
        assert decision.private
        assert "session_bound" in [reason.code for reason in decision.reasons]
        assert scripts.widened == []
        assert await turn(device, agent(kind, 1), "task tools=0", "hard") == "large"  # another session


async def test_a_private_request_binds_although_it_failed(tmp_path: Path) -> None:
    """Its client repeats it without the tag."""
    async with bed(tmp_path) as (device, scripts):
        one = agent()
        device.engine.refusal = RuntimeError("no model")
        assert await turn(device, one, f"{SECRET} tools=0", "private") == "all_attempts_failed"
        device.engine.refusal = None
        status, _ = await one.ask(device.session, "hard")
        assert status == 200
        for _ in range(12):
            await asyncio.sleep(0)
        assert device.newest().outcome.target == "small"
        assert scripts.widened == []


@pytest.mark.parametrize(
    ("refused", "status"), [("draining", 503), ("rate", 429), ("model", 404), ("job", 400), ("background", 400)]
)
async def test_a_private_request_binds_although_it_was_refused(tmp_path: Path, refused: str, status: int) -> None:
    """It was read, but neither admitted nor decided. The daemon is started again before its client repeats it."""
    limits = "limits: {per_client_rps: 0.001, " if refused == "rate" else "limits: {"
    path, words = "/v1/chat/completions", f"{SECRET} tools=0"
    body: dict[str, object] = {"model": "auto", "messages": [{"role": "user", "content": words}]}
    headers = {"x-causeway-tags": "private"}
    async with bed(tmp_path, LOOP.replace("limits: {", limits)) as (device, _):
        if refused == "draining":
            device.parts.admission.drain()
        elif refused == "rate":
            assert (await device.ask("tools=0")).status == 200
        elif refused == "model":
            body["model"] = "nobody"
        elif refused == "job":
            headers["prefer"], body["stream"] = "respond-async", True
        elif refused == "background":
            path, body = "/v1/responses", {"model": "auto", "input": words, "background": True}
        async with device.session.post(path, json=body, headers=headers) as response:
            assert response.status == status
    async with bed(tmp_path) as (device, scripts):
        answer = await device.ask(words, tags="hard")
        assert (answer.status, answer.headers["x-causeway-target"], scripts.widened) == (200, "small", [])


@pytest.mark.parametrize("kind", ["history", "named"])
async def test_sessions_survive_a_restart(tmp_path: Path, kind: Kind) -> None:
    one, private = agent(kind), agent(kind, 1)
    async with bed(tmp_path) as (device, _):
        assert await turn(device, one, "task tools=1", "hard") == "large"
        assert await turn(device, private, f"{SECRET} tools=0", "private") == "small"
    async with bed(tmp_path) as (device, scripts):
        assert await turn(device, one) == "large"
        assert await turn(device, private, "task tools=0", "hard") == "small"
        assert (scripts.foreign, scripts.widened) == ([], [])


async def test_a_job_continues_the_loop(tmp_path: Path) -> None:
    """A job has the tag of its session, and the history anyway."""
    async with bed(tmp_path) as (device, scripts):
        one = agent("named")
        assert await turn(device, one, "task tools=1") == "small"
        one.say("")
        headers = {"x-causeway-tags": "hard"}
        _, body = one.request(headers, stream=False)
        async with device.session.post("/v1/jobs", json=body, headers=headers) as response:
            job = (await response.json())["id"]
        async with asyncio.timeout(10.0):
            while True:
                async with device.session.get(f"/v1/jobs/{job}") as response:
                    view = await response.json()
                if view["status"] not in ("queued", "waiting", "running"):
                    break
                await asyncio.sleep(0.02)
        assert view["status"] == "succeeded"
        assert scripts.foreign == []
        assert device.newest().outcome.target == "small"


async def test_answers_of_the_cache_neither_widen_nor_cross_a_session(tmp_path: Path) -> None:
    """A pinned turn is never answered by another request's answer; the first of a session may be."""
    cached = LOOP + "cache: [{exact: {ttl: 1h}, allow_sampled: true, allow_tools: true}]\n"
    async with bed(tmp_path, cached) as (device, scripts):
        first, second = agent(), agent("history", 1)
        assert await turn(device, first, "task tools=1", "hard") == "large"
        assert await turn(device, second, "task tools=1", "hard") == "large"
        assert device.newest().outcome.cache == "hit"
        assert await turn(device, second) == "large"
        assert device.newest().outcome.cache == "bypass"
        assert device.newest().outcome.cache_reason == "the session stays at its target, or is bound"
        assert scripts.foreign == []


async def test_explain_shows_what_is_known_of_the_session(tmp_path: Path) -> None:
    async with bed(tmp_path) as (device, _):
        one = agent("named")
        assert await turn(device, one, "task tools=1", "hard") == "large"
        one.say("")
        headers: dict[str, str] = {}
        _, body = one.request(headers, stream=False)
        async with device.session.post("/v1/route", json=body, headers=headers) as response:
            plan = await response.json()
        assert plan["estimates"]["session"]["target"] == "large"
        assert plan["estimates"]["session"]["tool_result"] is True
        assert [attempt["target"]["name"] for attempt in plan["decision"]["attempts"]] == ["large"]
        assert plan["decision"]["pinned"] == "large"


async def test_metrics_count_turns_and_lost_tokens(tmp_path: Path) -> None:
    async with bed(tmp_path) as (device, _):
        one = agent()
        assert [await turn(device, one, "task tools=0", tags) for tags in ("hard", "")] == ["large", "small"]
        page = (await device.get("/metrics")).body.decode()
        assert 'causeway_edge_session_turns_total{status="new",target="large"} 1.0' in page
        assert 'causeway_edge_session_turns_total{status="switched",target="small"} 1.0' in page
        assert 'causeway_edge_session_lost_tokens_total{target="small"} 12.0' in page


async def test_a_header_that_cannot_be_a_name_is_refused(tmp_path: Path) -> None:
    async with bed(tmp_path) as (device, _):
        answer = await device.ask(headers={"x-session-id": "x" * 300})
        assert (answer.status, json.loads(answer.body)["error"]["param"]) == (400, "x-session-id")


CLIENT, OTHER = b"c" * KEY_BYTES, b"o" * KEY_BYTES


async def test_the_store_is_bounded_and_keeps_bound_sessions_apart(tmp_path: Path) -> None:
    store = SessionStore(tmp_path, lambda: 0.0, most=3)
    private = Session(on_device=True)
    await _put(store, b"p", private)
    for at in range(6):
        await _put(store, bytes([at]), Session(target=str(at)))
    assert store.find(CLIENT, b"p") == private
    gone = [True, True, True, False, False, False]
    assert [store.find(CLIENT, bytes([at])) is None for at in range(6)] == gone
    store.close()
    again = SessionStore(tmp_path, lambda: 0.0, most=3)
    await again.load()
    assert again.find(CLIENT, b"p") == private
    assert [again.find(CLIENT, bytes([at])) is None for at in range(6)] == gone
    again.close()


@pytest.mark.parametrize("on_device", [True, False])
async def test_a_client_with_many_sessions_does_not_displace_anothers(tmp_path: Path, on_device: bool) -> None:
    """Neither before a restart nor after it; and what is bound goes from the others to its own place once."""
    store = SessionStore(tmp_path, lambda: 0.0, most=4)
    one = Session(target="one", on_device=on_device)
    await _put(store, b"a", Session(target="one"), OTHER)
    await _put(store, b"a", one, OTHER)
    for at in range(9):
        await _put(store, bytes([at]), Session(target=str(at), on_device=on_device))
    store.close()
    again = SessionStore(tmp_path, lambda: 0.0, most=4)
    await again.load()
    for kept in (store, again):
        assert kept.find(OTHER, b"a") == one
        found = [at for at in range(9) if kept.find(CLIENT, bytes([at])) is not None]
        assert found == [6, 7, 8]
    again.close()


async def test_a_file_that_cannot_be_written_is_a_problem_of_no_answer(tmp_path: Path) -> None:
    async with bed(tmp_path) as (device, _):
        folder = tmp_path / "state" / "sessions-2.sqlite"
        folder.mkdir(parents=True)
        one = agent()
        assert [await turn(device, one, "task tools=1", "hard"), await turn(device, one)] == ["large", "large"]
        assert any("sessions-2.sqlite" in problem for problem in device.parts.problems())


async def _put(store: SessionStore, key: bytes, state: Session, client: bytes = CLIENT) -> None:
    written = store.put(client, {key: state})
    assert written is not None
    await written
