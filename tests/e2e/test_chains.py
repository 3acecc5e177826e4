"""A chain of responses that began at a gateway goes on at a device, and back in the cloud where the policy says so."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from causeway_server.edge_node.config.schema import CloudServer
from tests.cloud_pool.responses.conftest import TOKENS, StoringGateway, serving
from tests.edge_node.device import POLICY, Device, running
from tests.edge_node.responses.support import SERVER, client_of, conversation_of
from tests.own_task import in_own_task
from tests.redis_server import RedisServer, redis_server

__all__ = ["redis_server"]
pytestmark = [pytest.mark.redis, pytest.mark.slow]
EDGE, CLOUD = "edge says so", "cloud says so"
KEY = {"x-causeway-cloud-key": TOKENS["kiosk"]}


@asynccontextmanager
async def both(tmp_path: Path, redis: RedisServer, region: str = "") -> AsyncIterator[tuple[StoringGateway, Device]]:
    """A gateway, and a device of it whose own token is another client's."""
    policy = POLICY.replace("model: m-large", "model: large")
    async with in_own_task(serving(tmp_path, redis, region)) as gateway:
        clouds = {"main": CloudServer(url=gateway.app.url, key=TOKENS["till"], region=region)}
        async with running(tmp_path / "device", policy=policy, server=SERVER, clouds=clouds) as device:
            yield gateway, device


async def test_a_chain_goes_on_at_the_device_and_back_in_the_cloud(tmp_path: Path, redis_server: RedisServer) -> None:
    """The device reads the history once, and keeps it; a conversation's turn is read as well."""
    async with both(tmp_path, redis_server) as (gateway, device), client_of(device) as client:
        talk = await gateway.client.conversations.create()
        first = await gateway.client.responses.create(model="large", input="one", conversation=talk.id)
        second = await gateway.client.responses.create(model="large", input="two", conversation=talk.id)
        chained = await gateway.client.responses.create(model="large", input="two", previous_response_id=first.id)
        for name in (second.id, chained.id):
            fields: Any = {"model": "auto", "store": True}
            third = await client.responses.create(input="3", previous_response_id=name, **fields, extra_headers=KEY)
            said = [("user", "one"), ("assistant", CLOUD), ("user", "two"), ("assistant", CLOUD), ("user", "3")]
            assert conversation_of(device) == said
            assert third.previous_response_id == name
            await gateway.client.responses.delete(name)
        async with client_of(device, tags="cloud") as roaming:
            fourth = await roaming.responses.create(input="4", previous_response_id=third.id, **fields)
            assert fourth.output_text == CLOUD
            assert gateway.asked == [*said, ("assistant", EDGE), ("user", "4")]
            fifth = await client.responses.create(input="5", previous_response_id=fourth.id, **fields)
            assert fifth.output_text == EDGE
            items = await client.responses.input_items.list(fifth.id, order="asc")
            assert [item.to_dict()["role"] for item in items.data] == ["user", "assistant"] * 4 + ["user"]


async def test_a_history_of_another_client_is_not_found(tmp_path: Path, redis_server: RedisServer) -> None:
    """Neither under the device's own token nor under another client's key: as if the id had never been."""
    async with both(tmp_path, redis_server) as (gateway, device), client_of(device) as client:
        own = await gateway.other.responses.create(model="large", input="secret")
        ended = await gateway.client.responses.create(model="large", input="one")
        keys: list[tuple[str, dict[str, str]]] = [(own.id, {}), (own.id, KEY), (ended.id, {})]
        faults = set()
        for name, headers in (*keys, (f"resp_{'0' * 24}", KEY)):
            with pytest.raises(openai.NotFoundError) as refused:
                await client.responses.create(model="auto", input="x", previous_response_id=name, extra_headers=headers)
            faults.add(str(refused.value.body).replace(name, "ID"))
        assert len(faults) == 1
        for key, error in (("unknown", openai.PermissionDeniedError), ("a b", openai.BadRequestError)):
            with pytest.raises(error):
                await client.responses.create(
                    model="auto", input="x", previous_response_id=own.id, extra_headers={"x-causeway-cloud-key": key}
                )
        assert device.engine.calls == []


async def test_what_goes_on_from_a_bound_response_is_bound(tmp_path: Path, redis_server: RedisServer) -> None:
    """The cloud has no region on this device, so the next turn cannot go there."""
    async with both(tmp_path, redis_server, "eu") as (gateway, _):
        eu = {"x-causeway-tags": "in-region:eu"}
        first = await gateway.client.responses.create(model="large", input="one", store=True, extra_headers=eu)
        clouds = {"main": CloudServer(url=gateway.app.url, key=TOKENS["till"])}
        folder = tmp_path / "elsewhere"
        async with running(folder, server=SERVER, clouds=clouds) as device, client_of(device, tags="cloud") as client:
            raw = await client.responses.with_raw_response.create(
                model="auto", input="two", previous_response_id=first.id, store=True, extra_headers=KEY
            )
            assert raw.headers["x-causeway-route"] == "edge"
            with pytest.raises(openai.InternalServerError) as refused:
                await client.responses.create(model="large", input="3", previous_response_id=raw.parse().id)
            assert refused.value.code == "outside_region"


async def test_a_response_that_is_still_made_is_not_continued(tmp_path: Path, redis_server: RedisServer) -> None:
    async with both(tmp_path, redis_server) as (gateway, device), client_of(device) as client:
        made = await gateway.client.responses.create(model="large", input="one", background=True)
        with pytest.raises(openai.ConflictError):
            await client.responses.create(model="auto", input="2", previous_response_id=made.id, extra_headers=KEY)


async def test_without_the_cloud_the_client_is_told(tmp_path: Path, redis_server: RedisServer) -> None:
    async with both(tmp_path, redis_server) as (gateway, device), client_of(device) as client:
        made = await gateway.client.responses.create(model="large", input="one")
        await gateway.app.stop()
        with pytest.raises(openai.InternalServerError) as refused:
            await client.responses.create(model="auto", input="2", previous_response_id=made.id, extra_headers=KEY)
        assert refused.value.code == "cloud_unreachable"
