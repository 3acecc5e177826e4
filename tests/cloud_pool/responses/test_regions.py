"""Stored responses that are bound to regions: stored, continued and read only where the store is in them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import openai
import pytest

from causeway_server.cloud_pool.accounts.tenants.config import TenantLimits, TenantsConfig
from tests.redis_server import RedisServer

from .conftest import StoringGateway, serving

EU = {"x-causeway-tags": "in-region:eu"}
BOUND = TenantsConfig(default=TenantLimits(regions=("eu",)))


def asked(gateway: StoringGateway) -> int:
    """Return how often the server was asked; a gateway also warms its tier up."""
    return sum("'one'" in str(body["messages"]) for body in gateway.cloud.bodies)


async def test_a_chain_keeps_its_regions(tmp_path: Path, redis_server: RedisServer) -> None:
    """A request without a tag that continues one with a tag is refused where it may not be."""
    async with serving(tmp_path, redis_server, "eu") as gateway:
        create = gateway.client.responses.create
        first = await create(model="large", input="one", store=True, extra_headers=EU)
        second = await create(model="large", input="two", previous_response_id=first.id)
        us = {"x-causeway-tags": "in-region:us"}
        with pytest.raises(openai.InternalServerError, match="its bindings exclude each other"):
            await create(model="large", input="three", previous_response_id=second.id, extra_headers=us)
        assert asked(gateway) == 2
        raw = await gateway.client.responses.with_raw_response.retrieve(second.id)
        assert raw.headers["x-causeway-tags"] == "in-region:eu"  # what continues it elsewhere is bound, too
        compacted = await gateway.client.responses.compact(model="large", previous_response_id=second.id)
        items: Any = [compacted.output[0].to_dict(), {"role": "user", "content": "four"}]
        with pytest.raises(openai.InternalServerError, match="its bindings exclude each other"):
            await create(model="large", input=items, extra_headers=us)


async def test_items_that_are_added_keep_their_regions(tmp_path: Path, redis_server: RedisServer) -> None:
    items: Any = [{"role": "user", "content": "one"}]
    async with serving(tmp_path, redis_server, "eu") as gateway:
        talk = await gateway.client.conversations.create(items=items, extra_headers=EU)
        us = {"x-causeway-tags": "in-region:us"}
        with pytest.raises(openai.InternalServerError, match="its bindings exclude each other"):
            await gateway.client.responses.create(model="large", input="two", conversation=talk.id, extra_headers=us)
        assert asked(gateway) == 0


@pytest.mark.parametrize("store_region", ["us", ""])
@pytest.mark.parametrize("how", [{"extra_headers": EU}, {}], ids=["tag", "tenant"])
async def test_a_store_outside_keeps_no_bound_response(
    tmp_path: Path, redis_server: RedisServer, store_region: str, how: Mapping[str, Any]
) -> None:
    """By default it is not stored; where the client asks for that, it is refused before a model is asked."""
    tenants = None if how else BOUND
    async with serving(tmp_path, redis_server, store_region, tenants) as gateway:
        create = gateway.client.responses.create
        made = await create(model="large", input="one", **how)
        assert made.store is False
        with pytest.raises((openai.NotFoundError, openai.InternalServerError)):
            await gateway.client.responses.retrieve(made.id)
        asks: tuple[dict[str, Any], ...] = ({"store": True}, {"background": True})
        for state in asks:
            with pytest.raises(openai.InternalServerError) as refused:
                await create(model="large", input="one", **state, **how)
            assert refused.value.code == "outside_region"
        assert asked(gateway) == 1
