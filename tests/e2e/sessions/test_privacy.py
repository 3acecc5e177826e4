"""A live session never forgets that a turn was private: on real sockets of the daemon and of the gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from causeway_server.cloud_pool.config import Config
from tests.cloud_pool.accounts.identity.gateway import running as gateway_running
from tests.edge_node.device import Device, running
from tests.waiting import until

from .peer import SAY_HELLO, Event, Peer, Refused, done

PRIVATE: Event = {"causeway": {"tags": ["Private"]}}
STAYS: Event = {"causeway": {"prefer": "only_on_device"}}
CLOUD = {"x-causeway-tags": "cloud"}
"""The route of a request with this tag prefers the cloud; a private one stays all the same."""


@pytest.fixture
async def device(tmp_path: Path) -> AsyncIterator[Device]:
    async with running(tmp_path) as device:
        yield device


@asynccontextmanager
async def peer(device: Device, query: str = "model=auto", **headers: str) -> AsyncIterator[Peer]:
    found = await Peer.connect(device.app.port, query, headers=headers)
    try:
        if "session_id" not in query:
            await found.event()
        yield found
    finally:
        found.cut()


async def route(client: Peer, text: str = "hello", **response: object) -> str:
    return str(done(await client.ask(text, **response))["causeway"]["route"])


@pytest.mark.parametrize("restriction", [PRIVATE, STAYS], ids=["tag", "preference"])
async def test_the_text_of_a_private_turn_never_leaves_with_a_later_one(device: Device, restriction: Event) -> None:
    async with peer(device, **CLOUD) as client:
        assert await route(client, "public") == "cloud"
        assert await route(client, "secret", **restriction) == "edge"
        assert await route(client, "and now?") == "edge"
    assert len(device.cloud.bodies) == 1
    assert b"secret" not in device.cloud.bodies[0]


async def test_a_private_turn_fails_closed_and_so_does_the_next(device: Device) -> None:
    device.engine.fault = "refuse"
    async with peer(device, **CLOUD) as client:
        for restriction in (PRIVATE, {}):
            response = done(await client.ask("secret", **restriction))
            assert (response["status"], response["status_details"]["error"]["code"]) == (
                "failed",
                "all_attempts_failed",
            )
    assert device.cloud.bodies == []


async def test_a_cancelled_private_turn_stays_private(device: Device) -> None:
    async with peer(device, **CLOUD) as client:
        device.engine.pause_after = 1
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "secret"}]}
        await client.send("conversation.item.create", item=item)
        await client.send("response.create", response=PRIVATE)
        await client.until("response.output_text.delta")
        await until(lambda: device.engine.paused)
        await client.send("response.cancel")
        await client.until("response.done")
        device.engine.pause_after = None
        assert await route(client) == "edge"
    assert device.cloud.bodies == []


async def test_the_text_of_a_refused_private_turn_never_leaves(device: Device) -> None:
    async with peer(device, **CLOUD) as client:
        await client.send("conversation.item.create", item=SAY_HELLO)
        await client.send("response.create", response={**PRIVATE, "max_output_tokens": -5})
        await client.until("error")
        assert await route(client, "and now?") == "edge"
    assert not device.cloud.bodies


async def test_a_resumed_session_remembers_a_private_turn(device: Device) -> None:
    async with peer(device, **CLOUD) as first:
        assert await route(first, "secret", **PRIVATE) == "edge"
        async with peer(device, f"session_id={first.session_id}&after={first.last}") as second:
            assert await route(second) == "edge"
    assert device.cloud.bodies == []


async def test_an_update_never_widens_a_session(device: Device) -> None:
    async with peer(device, **CLOUD) as client:
        await client.send("session.update", session=STAYS)
        await client.send("session.update", session={"causeway": {"prefer": "only_cloud"}})
        refused = (await client.until("error"))[-1]["error"]
        assert (refused["code"], refused["param"]) == ("invalid_value", "session.causeway.prefer")
        await client.send("session.update", session={"causeway": None})
        assert await route(client, "secret") == "edge"
    assert device.cloud.bodies == []


@pytest.mark.parametrize(
    ("lines", "param"),
    [
        ("x-causeway-prefer: prefer_cloud\r\nx-causeway-prefer: only_on_device", "x-causeway-prefer"),
        ("x-causeway-tags: a b", "x-causeway-tags"),
    ],
)
async def test_a_handshake_with_ambiguous_headers_is_refused(device: Device, lines: str, param: str) -> None:
    with pytest.raises(Refused) as refused:
        await Peer.connect(device.app.port, headers={"x-any": f"1\r\n{lines}"})
    assert refused.value.status == 400
    assert param.encode() in refused.value.body


async def test_tags_on_two_lines_of_the_handshake_both_bind(device: Device) -> None:
    async with peer(device, **{"x-any": "1\r\nx-causeway-tags: cloud\r\nx-causeway-tags: Private"}) as client:
        assert await route(client) == "edge"
    assert device.cloud.bodies == []


async def test_the_gateway_keeps_the_tags_of_a_turn_too() -> None:
    """There a private request neither reads nor writes the shared cache."""
    async with gateway_running(Config()) as gateway, anyio.create_task_group() as tasks:
        gateway.server.sessions.start(tasks)
        port = int(gateway.url.rpartition(":")[2])
        client = await Peer.connect(
            port, "model=assistant-large", headers={"x-any": "1\r\nx-causeway-tags: B\r\nx-causeway-tags: a"}
        )
        await client.event()
        for restriction in ({}, PRIVATE, {}):
            await client.ask("hello", **restriction)
        tags = [call.request.hints.tags for call in gateway.service.calls]
        assert tags == [("a", "b"), ("a", "b", "private"), ("a", "b", "private")]
        await client.close()
        tasks.cancel_scope.cancel()
