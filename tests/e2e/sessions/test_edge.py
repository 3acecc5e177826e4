"""Live sessions of the daemon, with scripted generators: the hops, interruption, resuming, drain, and bad peers."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from causeway_server.edge_node.clock import Clock
from causeway_server.edge_node.config.schema import KeyConfig, ServerConfig
from causeway_server.router.bundle.settings import RealtimeConfig
from tests.edge_node.device import POLICY, Device, running
from tests.edge_node.scripted import EDGE_WORDS
from tests.waiting import until

from .peer import BINARY, SAY_HELLO, TEXT, Peer, Refused, done, text_of

ANSWER = "".join(EDGE_WORDS)
SMALL = RealtimeConfig(max_sessions=4, max_bytes=4096, replay_bytes=2000)


@pytest.fixture
async def device(tmp_path: Path) -> AsyncIterator[Device]:
    async with running(tmp_path) as device:
        yield device


@asynccontextmanager
async def peer(device: Device, query: str = "model=auto", **headers: str) -> AsyncIterator[Peer]:
    """A connection with its first event; cut at the end."""
    found = await Peer.connect(device.app.port, query, headers=headers)
    try:
        if "session_id" not in query:
            assert (await found.event())["type"] == "session.created"
        yield found
    finally:
        found.cut()


def stats(device: Device) -> tuple[int, int]:
    """Sessions with a connection, and without."""
    found = device.parts.sessions.stats
    return found.connected, found.cut


async def paused_answer(device: Device, client: Peer, words: int = 1) -> None:
    """Start an answer of the device that stops for good after so many words."""
    device.engine.pause_after = words
    await client.send("conversation.item.create", item=SAY_HELLO)
    await client.send("response.create")
    for _ in range(words):
        await client.until("response.output_text.delta")
    await until(lambda: device.engine.paused)


# --- hops ------------------------------------------------------------------------------------------------------------


async def test_a_response_is_one_request_with_a_decision_and_an_outcome(device: Device) -> None:
    async with peer(device) as client:
        events = await client.ask()
        response = done(events)
        assert (text_of(events), response["status"]) == (ANSWER, "completed")
        about = response["causeway"]
        assert (about["route"], about["target"], about["reason"], about["cache"]) == (
            "edge",
            "small",
            "edge-first",
            "bypass",
        )
        assert response["id"] == f"resp_{about['decision']}"
    record = device.newest()
    assert (record.id, record.outcome.status, record.outcome.usage.completion_tokens) == (about["decision"], "ok", 3)
    device.assert_nothing_leaks()


async def test_a_conversation_goes_on(device: Device) -> None:
    async with peer(device) as client:
        await client.ask("first")
        await client.ask("second")
    messages = device.engine.calls[-1].request.messages
    assert [message.role for message in messages] == ["user", "assistant", "user"]


async def test_an_agents_whole_configuration_leaves_what_the_device_has(device: Device) -> None:
    """Its instructions are not lost for audio that this device does not take; the error says what is not there."""
    audio = {"input": {"turn_detection": {"type": "semantic_vad"}}, "output": {"voice": "alloy"}}
    async with peer(device) as client:
        await client.send("session.update", session={"instructions": "Be brief.", "audio": audio, "tracing": "auto"})
        await client.until("session.updated")
        (told,) = await client.until("error")
        for name in ("tracing", "audio.input", "audio.output"):
            assert f"`session.{name}" in told["error"]["message"]
        await client.ask("first")
    assert [message.role for message in device.engine.calls[-1].request.messages] == ["system", "user"]


async def test_constraints_bind_a_session_by_its_headers_or_its_settings(device: Device) -> None:
    """The route prefers the cloud; a private request stays, and fails closed without a device."""
    async with peer(device, **{"x-causeway-tags": "cloud,private"}) as client:
        assert done(await client.ask())["causeway"]["route"] == "edge"
    async with peer(device) as client:
        await client.send("session.update", session={"causeway": {"tags": ["cloud"]}})
        assert done(await client.ask())["causeway"]["route"] == "cloud"
        await client.send("session.update", session={"causeway": {"tags": ["cloud", "private"]}})
        assert done(await client.ask())["causeway"]["route"] == "edge"
        device.engine.fault = "refuse"
        response = done(await client.ask())
        assert (response["status"], response["status_details"]["error"]["code"]) == ("failed", "all_attempts_failed")
    assert len(device.cloud.bodies) == 1


async def test_the_policys_cache_answers_a_session_too(device: Device) -> None:
    for expected in ("miss", "hit"):
        async with peer(device) as client:
            await client.send("session.update", session={"temperature": 0})
            response = done(await client.ask())
            assert (response["causeway"]["cache"], response["status"]) == (expected, "completed")
    assert len(device.engine.calls) == 1


async def test_admission_limits_sessions_as_requests(tmp_path: Path) -> None:
    limited = POLICY.replace("queue: 4", "queue: 4, per_client_rps: 0.01")
    async with running(tmp_path, policy=limited) as device, peer(device) as client:
        await client.ask()
        details = done(await client.ask())["status_details"]
        assert details["error"]["code"] == "rate_limit_exceeded"


# --- who may ---------------------------------------------------------------------------------------------------------


async def test_a_session_needs_the_devices_key_which_a_browser_sends_as_a_subprotocol(tmp_path: Path) -> None:
    key = KeyConfig("kiosk", hashlib.sha256(b"secret").hexdigest(), ("private",))
    server = ServerConfig(port=0, drain_s=1.0, keys=(key,), origins=("https://elsewhere",))
    async with running(tmp_path, server=server) as device:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Sec-WebSocket-Protocol": "realtime"}):
            with pytest.raises(Refused) as refused:
                await Peer.connect(device.app.port, headers=headers)
            assert (refused.value.status, refused.value.code) == (401, "invalid_api_key")
        browser = {"Sec-WebSocket-Protocol": "realtime, openai-insecure-api-key.secret", "Origin": "https://elsewhere"}
        for headers in ({"Authorization": "Bearer secret"}, browser):
            async with peer(device, **headers) as client:
                await client.ask()
            assert device.newest().request.client == "kiosk"
            assert device.newest().request.tags == ("private",)


async def test_no_page_of_another_origin_gets_in(device: Device) -> None:
    """Browsers let any page open a WebSocket to this device."""
    for origin in ("https://evil.example", f"http://localhost:{device.app.port}", "null"):
        with pytest.raises(Refused) as refused:
            await Peer.connect(device.app.port, headers={"Origin": origin})
        assert (refused.value.status, refused.value.code) == (403, "origin_not_allowed")
    async with peer(device, Origin=f"http://127.0.0.1:{device.app.port}"):
        assert stats(device) == (1, 0)


async def test_what_cannot_become_a_session_is_refused_over_http(device: Device) -> None:
    for query, headers, code in (
        ("model=none", {}, "model_not_found"),
        ("model=auto", {"x-causeway-tag": "private"}, "unknown_parameter"),
        ("model=auto", {"Upgrade": "h2c"}, "invalid_value"),
        ("model=auto", {"Sec-WebSocket-Protocol": "chat"}, "invalid_value"),
    ):
        with pytest.raises(Refused) as refused:
            await Peer.connect(device.app.port, query, headers=headers)
        assert refused.value.code == code
    assert stats(device) == (0, 0)


async def test_sessions_are_bounded_and_a_cut_one_gives_way(tmp_path: Path) -> None:
    """Of four, one client has two."""
    async with running(tmp_path, realtime=SMALL) as device:
        async with peer(device) as first, peer(device):
            with pytest.raises(Refused) as refused:
                await Peer.connect(device.app.port)
            assert (refused.value.status, refused.value.code) == (429, "queue_full")
            first.cut()
            await until(lambda: stats(device) == (1, 1))
            async with peer(device):
                assert stats(device) == (2, 0)
        assert device.parts.sessions.stats.ended == {"gave_way": 1}


# --- interruption ----------------------------------------------------------------------------------------------------


async def test_an_interruption_stops_the_work_and_the_session_goes_on(device: Device) -> None:
    async with peer(device) as client:
        await paused_answer(device, client)
        await client.send("response.cancel")
        response = done(await client.until("response.done"))
        assert (response["status"], response["output"][0]["status"]) == ("cancelled", "incomplete")
        await until(lambda: device.engine.running == 0)
        await until(lambda: device.parts.decisions.newest is not None)  # the record comes after the answer's end
        assert device.newest().outcome.status == "cancelled"
        device.engine.pause_after = None
        assert done(await client.ask())["status"] == "completed"
    device.assert_nothing_leaks()


async def test_a_client_that_leaves_ends_its_session_and_its_answer(device: Device) -> None:
    async with peer(device) as client:
        await paused_answer(device, client)
        await client.close()
        await until(lambda: device.engine.running == 0 and stats(device) == (0, 0))
        assert device.parts.sessions.stats.ended == {"closed": 1}


@pytest.mark.parametrize("target", ["edge", "cloud"])
async def test_an_answer_that_breaks_is_told_and_the_session_goes_on(device: Device, target: str) -> None:
    """After the first word no other target may answer."""
    (device.engine if target == "edge" else device.cloud).fault = "die"
    async with peer(device, **{"x-causeway-tags": target}) as client:
        response = done(await client.ask())
        assert (response["status"], response["output"][0]["status"]) == ("failed", "incomplete")
        (device.engine if target == "edge" else device.cloud).fault = "none"
        assert done(await client.ask())["status"] == "completed"
    device.assert_nothing_leaks()


# --- resuming --------------------------------------------------------------------------------------------------------


async def test_a_cut_connection_resumes_without_losing_or_repeating_an_event(device: Device) -> None:
    """The answer goes on while the client is away."""
    device.engine.gate = asyncio.Event()
    async with peer(device) as first:
        await first.send("conversation.item.create", item=SAY_HELLO)
        await first.send("response.create")
        await first.until("response.created")
        first.cut()
        await until(lambda: stats(device) == (0, 1))
        device.engine.gate.set()
        await until(lambda: device.engine.running == 0)
        async with peer(device, f"session_id={first.session_id}&after={first.last}") as second:
            await second.until("response.done")
            events = first.events + second.events
            assert [event["sequence_number"] for event in events] == list(range(1, len(events) + 1))
            assert text_of(events) == ANSWER
            assert done(await second.ask())["status"] == "completed"
    assert device.parts.sessions.stats.resumed == 1


async def test_events_that_were_sent_but_not_received_are_sent_again(device: Device) -> None:
    async with peer(device) as first:
        events = await first.ask()
        first.cut()
        kept = events[3]["sequence_number"]
        async with peer(device, f"session_id={first.session_id}&after={kept}") as second:
            assert await second.until("response.done") == events[4:]


async def test_of_two_connections_that_resume_the_second_takes_over(device: Device) -> None:
    async with peer(device) as first:
        resume = f"session_id={first.session_id}&after={first.last}"
        async with peer(device, resume) as second:
            assert (await first.closed()).code == 4409
            async with peer(device, resume) as third:
                assert (await second.closed()).code == 4409
                assert done(await third.ask())["status"] == "completed"
        await until(lambda: stats(device) == (0, 1))


async def test_a_resumed_session_keeps_its_tags_and_adds_those_of_the_connection(device: Device) -> None:
    async with peer(device, **{"x-causeway-tags": "cloud"}) as first:
        resume = f"session_id={first.session_id}&after={first.last}"
        async with peer(device, resume, **{"x-causeway-tags": "private"}) as second:
            assert done(await second.ask())["causeway"]["route"] == "edge"


@pytest.mark.parametrize(
    ("query", "code", "error"),
    [
        ("session_id=sess_0&after=0", 4404, "session_not_found"),
        ("session_id={id}&after=99", 4410, "events_lost"),
        ("session_id={id}&after=1", 4410, "events_lost"),
        ("session_id={id}&after=-1", 4404, "invalid_value"),
    ],
)
async def test_a_session_that_cannot_be_resumed_says_why(tmp_path: Path, query: str, code: int, error: str) -> None:
    async with running(tmp_path, realtime=SMALL) as device, peer(device) as first:
        await first.ask()  # more events than are kept
        first.cut()
        async with peer(device, query.format(id=first.session_id)) as second:
            assert (await second.event())["error"]["code"] == error
            closed = await second.closed()
            assert (closed.code, closed.reason != "") == (code, True)


async def test_a_session_is_not_another_clients(tmp_path: Path) -> None:
    keys = tuple(KeyConfig(name, hashlib.sha256(name.encode()).hexdigest()) for name in ("a", "b"))
    server = ServerConfig(port=0, drain_s=1.0, keys=keys)
    async with running(tmp_path, server=server) as device, peer(device, Authorization="Bearer a") as first:
        query = f"session_id={first.session_id}&after={first.last}"
        async with peer(device, query, Authorization="Bearer b") as second:
            assert (await second.event())["error"]["code"] == "session_not_found"
        assert done(await first.ask())["status"] == "completed"


# --- ends ------------------------------------------------------------------------------------------------------------


async def test_sessions_end_when_they_are_idle_or_not_resumed(tmp_path: Path) -> None:
    late_s = 0.0
    clock = Clock(monotonic=lambda: time.monotonic() + late_s)
    async with running(tmp_path, clock=clock) as device, peer(device) as idle, peer(device) as cut:
        await paused_answer(device, cut)
        cut.cut()
        await until(lambda: stats(device) == (1, 1))
        late_s = 31.0
        device.parts.sessions.sweep()
        assert stats(device) == (1, 0)
        await until(lambda: device.engine.running == 0)  # its answer ends with it
        late_s = 901.0
        device.parts.sessions.sweep()
        assert (await idle.closed()).code == 4408
        assert device.parts.sessions.stats.ended == {"not_resumed": 1, "idle": 1}


async def test_while_the_daemon_drains_sessions_are_told_and_end_after_their_answer(tmp_path: Path) -> None:
    server = ServerConfig(port=0, drain_s=60.0)
    async with running(tmp_path, server=server) as device, peer(device) as idle, peer(device) as busy:
        device.engine.gate = asyncio.Event()
        await busy.send("conversation.item.create", item=SAY_HELLO)
        await busy.send("response.create")
        await until(lambda: device.engine.running == 1)
        draining = asyncio.create_task(device.app.drain())
        assert (await idle.event())["error"]["code"] == "draining"
        assert (await idle.closed()).code == 1001
        device.engine.gate.set()
        assert done(await busy.until("response.done"))["status"] == "completed"
        assert (await busy.event())["error"]["code"] == "draining"
        assert (await busy.closed()).code == 1001
        assert await draining


async def test_a_daemon_that_stops_tells_the_clients_of_unfinished_answers(tmp_path: Path) -> None:
    async with running(tmp_path) as device, peer(device) as client:
        await paused_answer(device, client)
        closing = asyncio.create_task(device.app.close())
        response = done(await client.until("response.done"))
        assert (response["status"], response["status_details"]["error"]["code"]) == ("failed", "draining")
        assert (await client.closed()).code == 1001
        await closing


# --- bad peers -------------------------------------------------------------------------------------------------------


async def test_garbage_in_a_text_frame_is_an_error_event(device: Device) -> None:
    async with peer(device) as client:
        for payload in (b"", b"\xff\x00", b"[1", b'{"type":"no"}'):
            await client.send_frame(TEXT, payload)
            assert (await client.event())["type"] == "error"
        assert done(await client.ask())["status"] == "completed"


@pytest.mark.parametrize(("fault", "code"), [("binary", 1003), ("huge", 1009), ("unmasked", 1002), ("opcode", 1002)])
async def test_a_frame_against_the_rules_closes_the_connection_and_the_session_can_be_resumed(
    tmp_path: Path, fault: str, code: int
) -> None:
    async with running(tmp_path, realtime=SMALL) as device, peer(device) as client:
        if fault == "binary":
            await client.send_frame(BINARY, b"{}")
        elif fault == "huge":
            await client.send_frame(TEXT, b"x" * 20_000)
        elif fault == "unmasked":
            await client.send_bytes(b"\x83\x01x")
        else:
            await client.send_bytes(b"\x8f\x80\0\0\0\0")
        assert (await client.closed()).code == code
        async with peer(device, f"session_id={client.session_id}&after={client.last}") as second:
            assert done(await second.ask())["status"] == "completed"


async def test_a_peer_that_reads_nothing_takes_bounded_memory(device: Device) -> None:
    """An answer without an end waits for its reader, others are served, and nothing is lost once it reads on."""
    device.engine.flood = True
    client = await Peer.connect(device.app.port, limit=1024)
    await client.event()
    await client.send("conversation.item.create", item=SAY_HELLO)
    await client.send("response.create")
    await until(lambda: device.parts.sessions.stats.unsent_bytes > 64 * 1024)
    assert (await device.ask(tags="cloud")).status == 200
    assert device.parts.sessions.stats.unsent_bytes < 100 * 1024
    await client.send("response.cancel")
    events = await client.until("response.done")
    assert [event["sequence_number"] for event in events] == list(range(2, len(events) + 2))
    client.cut()


async def test_a_peer_that_floods_waits_for_its_own_answers_and_others_are_served(device: Device) -> None:
    client = await Peer.connect(device.app.port, limit=1024)
    await client.event()

    async def flood() -> None:
        while True:
            await client.send("nonsense", event_id="x" * 500)

    flooding = asyncio.create_task(flood())
    await until(lambda: device.parts.sessions.stats.unsent_bytes > 64 * 1024)
    assert (await device.ask()).status == 200
    assert device.parts.sessions.stats.unsent_bytes < 70 * 1024
    flooding.cancel()
    client.cut()
    await until(lambda: stats(device)[0] == 0)


@pytest.mark.slow
async def test_a_half_open_peer_is_noticed_by_its_silence(tmp_path: Path) -> None:
    """It answers no ping: the connection is gone, and the session waits for its client."""
    async with running(tmp_path, realtime=RealtimeConfig(ping_s=1.0)) as device:
        client = await Peer.connect(device.app.port)
        await until(lambda: stats(device) == (1, 0))
        await until(lambda: stats(device) == (0, 1))
        client.cut()


async def test_metrics_count_sessions(device: Device) -> None:
    async with peer(device):
        text = (await device.get("/metrics")).body.decode()
        assert 'causeway_edge_sessions{state="connected"} 1.0' in text
