"""Live sessions of the gateway before a real Triton, whose model does what the prompt says."""

from __future__ import annotations

import time
from pathlib import Path

import anyio
import pytest

from causeway_server.cloud_pool.accounts.identity.config import FleetIdentityConfig, IdentityConfig
from causeway_server.cloud_pool.config import GatewaySessionConfig
from tests.cloud_pool.conftest import triton_environment
from tests.cloud_pool.dispatch.replica import Replica
from tests.e2e.identity.scripted_fleet import ScriptedFleet
from tests.waiting import until

from .gateway import FOREVER, orders, replica, running, words
from .peer import BINARY, Event, Peer, Refused, done, text_of

__all__ = ["replica", "triton_environment"]

pytestmark = [pytest.mark.triton, pytest.mark.slow]
TOKENS = "kiosk kiosk-secret\nother other-secret\n"


async def say(client: Peer, mark: str, *told: Event) -> None:
    content = [{"type": "input_text", "text": orders(mark, *told)}]
    await client.send("conversation.item.create", item={"type": "message", "role": "user", "content": content})
    await client.send("response.create")


async def test_a_response_is_one_request_with_one_outcome(replica: Replica, tmp_path: Path) -> None:
    async with running(replica, tmp_path) as gateway, gateway.peer() as client:
        events = await client.ask(orders("whole", *words(3)))
        response = done(events)
        assert (text_of(events), response["status"]) == ("w0 w1 w2 ", "completed")
        assert response["causeway"]["tier"] == "large"
        assert response["id"] == f"resp_{response['causeway']['request_id']}"
        await until(lambda: len(gateway.audit) == 1)
        record = gateway.audit[0]
        assert (record["route"], record["outcome"], record["tier"]) == ("realtime", "ok", "large")


async def test_an_interruption_stops_the_work_in_triton(replica: Replica, tmp_path: Path) -> None:
    async with running(replica, tmp_path) as gateway, gateway.peer() as client:
        await say(client, "interrupted", {"say": "w0 "}, FOREVER)
        await client.until("response.output_text.delta")
        await client.send("response.cancel")
        assert done(await client.until("response.done"))["status"] == "cancelled"
        await until(lambda: "cancelled" in replica.noted("interrupted"))
        assert done(await client.ask(orders("next", *words(1))))["status"] == "completed"


async def test_a_client_that_leaves_ends_its_answer(replica: Replica, tmp_path: Path) -> None:
    async with running(replica, tmp_path) as gateway, gateway.peer() as client:
        await say(client, "left", {"say": "w0 "}, FOREVER)
        await client.until("response.output_text.delta")
        await client.close()
        await until(lambda: "cancelled" in replica.noted("left"))
        assert gateway.open_sessions == (0, 0)


async def test_an_answer_that_breaks_is_told_and_the_session_goes_on(replica: Replica, tmp_path: Path) -> None:
    async with running(replica, tmp_path) as gateway, gateway.peer() as client:
        response = done(await client.ask(orders("broken", {"say": "w0 "}, {"fail": ["INTERNAL", "it broke"]})))
        assert (response["status"], response["output"][0]["status"]) == ("failed", "incomplete")
        assert done(await client.ask(orders("after", *words(1))))["status"] == "completed"


async def test_a_cut_connection_resumes_and_of_two_the_second_takes_over(replica: Replica, tmp_path: Path) -> None:
    async with running(replica, tmp_path) as gateway, gateway.peer() as first:
        await say(first, "cut", {"say": "w0 "}, {"wait": 0.2}, *words(5)[1:])
        await first.until("response.output_text.delta")
        first.cut()
        await until(lambda: gateway.open_sessions == (0, 1))
        resume = f"session_id={first.session_id}&after={first.last}"
        async with gateway.peer(resume) as second:
            await second.until("response.done")
            events = first.events + second.events
            assert [event["sequence_number"] for event in events] == list(range(1, len(events) + 1))
            assert text_of(events) == "w0 w1 w2 w3 w4 "
            async with gateway.peer(f"session_id={first.session_id}&after={second.last}"):
                assert (await second.closed()).code == 4409


async def test_a_session_needs_a_token_and_is_its_devices(replica: Replica, tmp_path: Path) -> None:
    async with running(replica, tmp_path, tokens=TOKENS, origins=("https://any",)) as gateway:
        with pytest.raises(Refused) as refused:
            await Peer.connect(gateway.port, "model=large")
        assert refused.value.status == 401
        browser = {"Sec-WebSocket-Protocol": "realtime, openai-insecure-api-key.kiosk-secret", "Origin": "https://any"}
        async with gateway.peer(**browser) as first:
            assert done(await first.ask(orders("token", *words(1))))["status"] == "completed"
            resume = f"session_id={first.session_id}&after={first.last}"
            async with gateway.peer(resume, Authorization="Bearer other-secret") as second:
                assert (await second.event())["error"]["code"] == "session_not_found"


async def test_a_connection_ends_when_its_token_is_revoked(replica: Replica, tmp_path: Path) -> None:
    """With its answer, which stops in Triton; another device's session goes on."""
    fleet = ScriptedFleet()
    async with fleet.running():
        trust = IdentityConfig(fleet=FleetIdentityConfig(url=fleet.url, tenants=("stores",), refresh_s=0.05))
        first, second = (f"Bearer {fleet.token(name, now=time.time() - 5)}" for name in ("kiosk-1", "kiosk-2"))
        async with (
            running(replica, tmp_path, identity=trust) as gateway,
            gateway.peer(Authorization=first) as client,
            gateway.peer(Authorization=second) as other,
        ):
            await say(client, "revoked", {"say": "w0 "}, FOREVER)
            await client.until("response.output_text.delta")
            fleet.revoke("kiosk-1")
            assert (await client.closed()).code == 4401
            refused = [event["error"]["message"] for event in client.events if event["type"] == "error"]
            assert refused == ["The device's tokens have been revoked."]
            await until(lambda: "cancelled" in replica.noted("revoked"))
            assert done(await other.ask(orders("goes-on", *words(1))))["status"] == "completed"


async def test_a_session_whose_token_expired_is_resumed_with_another_one(replica: Replica, tmp_path: Path) -> None:
    fleet = ScriptedFleet()
    async with fleet.running():
        fleet_config = FleetIdentityConfig(url=fleet.url, tenants=("stores",))
        trust = IdentityConfig(fleet=fleet_config, clock_skew_s=0.0)
        short = f"Bearer {fleet.token(lifetime_s=3.0)}"
        async with running(replica, tmp_path, identity=trust) as gateway, gateway.peer(Authorization=short) as client:
            assert (await client.closed()).code == 4401
            resume = f"session_id={client.session_id}&after={client.last}"
            async with gateway.peer(resume, Authorization=f"Bearer {fleet.token()}") as again:
                assert done(await again.ask(orders("again", *words(1))))["status"] == "completed"


@pytest.mark.parametrize(
    ("query", "headers", "code"),
    [
        ("", {}, "missing_required_parameter"),
        ("model=none", {}, "model_not_found"),
        ("model=large", {"Origin": "https://evil.example"}, "origin_not_allowed"),
        ("model=large", {"x-causeway-tag": "private"}, "unknown_parameter"),
    ],
)
async def test_what_cannot_become_a_session_is_refused_over_http(
    replica: Replica, tmp_path: Path, query: str, headers: dict[str, str], code: str
) -> None:
    async with running(replica, tmp_path) as gateway:
        with pytest.raises(Refused) as refused:
            await Peer.connect(gateway.port, query, headers=headers)
        assert (refused.value.code, gateway.open_sessions) == (code, (0, 0))


async def test_a_gateway_that_drains_ends_sessions_after_their_answers(replica: Replica, tmp_path: Path) -> None:
    async with running(replica, tmp_path) as gateway, gateway.peer() as idle, gateway.peer() as busy:
        await say(busy, "drained", {"say": "w0 "}, {"wait": 0.2}, {"say": "w1 "})
        await busy.until("response.output_text.delta")
        async with anyio.create_task_group() as draining:
            draining.start_soon(gateway.app.drain)
            assert (await idle.event())["error"]["code"] == "draining"
            assert (await idle.closed()).code == 1001
            assert done(await busy.until("response.done"))["status"] == "completed"
            assert (await busy.closed()).code == 1001
        with pytest.raises(Refused) as refused:
            await Peer.connect(gateway.port, "model=large")
        assert refused.value.code == "draining"


async def test_a_gateway_that_stops_tells_the_clients_of_unfinished_answers(replica: Replica, tmp_path: Path) -> None:
    async with running(replica, tmp_path) as gateway, gateway.peer() as client:
        await say(client, "stopped", {"say": "w0 "}, FOREVER)
        await client.until("response.output_text.delta")
        async with anyio.create_task_group() as stopping:
            stopping.start_soon(gateway.app.stop)
            response = done(await client.until("response.done"))
            assert response["status_details"]["error"]["code"] == "draining"
            assert (await client.closed()).code == 1001


async def test_bad_frames_and_a_crowd(replica: Replica, tmp_path: Path) -> None:
    few = GatewaySessionConfig(max_sessions=1)
    async with running(replica, tmp_path, realtime=few) as gateway, gateway.peer() as client:
        with pytest.raises(Refused) as refused:
            await Peer.connect(gateway.port, "model=large")
        assert refused.value.status == 429
        await client.send_frame(BINARY, b"{}")
        assert (await client.closed()).code == 1003
        await until(lambda: gateway.open_sessions == (0, 1))
        async with gateway.peer():  # the cut one gives way
            assert gateway.open_sessions == (1, 0)
