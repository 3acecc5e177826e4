"""Private responses of a device: in memory alone, for their client alone, and never to the cloud."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from .support import client_of, conversation_of, storing

ANSWER = "edge says so"
SECRET = "my secret is 4711"


def written(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


async def test_a_private_chain_is_in_memory_until_the_daemon_ends(tmp_path: Path) -> None:
    async with storing(tmp_path) as (device, _), client_of(device, tags="private") as client:
        made = await client.responses.create(model="auto", input=SECRET, store=True)
        talk = await client.conversations.create()
        await client.responses.create(model="auto", input=SECRET, conversation=talk.id)
        assert (await client.responses.retrieve(made.id)).output_text == ANSWER
        assert len((await client.conversations.items.list(talk.id)).data) == 2
        async with client_of(device, "till") as other:
            with pytest.raises(openai.NotFoundError):
                await other.responses.retrieve(made.id)
        assert b"4711" not in written(tmp_path)
    async with storing(tmp_path) as (_, client):
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(made.id)
        assert (await client.conversations.items.list(talk.id)).data == []
    assert b"4711" not in written(tmp_path)


@pytest.mark.parametrize("kind", ["chain", "conversation", "reference"])
async def test_what_continues_a_private_response_stays_on_the_device(tmp_path: Path, kind: str) -> None:
    """Also if nothing else of the request is private, and the policy prefers the cloud."""
    async with storing(tmp_path) as (device, _):
        async with client_of(device, tags="private") as client:
            talk = await client.conversations.create()
            where: dict[str, Any] = {"conversation": talk.id} if kind == "conversation" else {"store": True}
            made = await client.responses.create(model="auto", input=SECRET, **where)
        reference: Any = [{"type": "item_reference", "id": made.output[0].id}]
        more: dict[str, dict[str, Any]] = {
            "chain": {"input": "two", "previous_response_id": made.id},
            "conversation": {"input": "two", "conversation": talk.id},
            "reference": {"input": [*reference, {"role": "user", "content": "two"}]},
        }
        async with client_of(device, tags="cloud") as client:
            raw = await client.responses.with_raw_response.create(model="auto", store=True, **more[kind])
            assert raw.headers["x-causeway-route"] == "edge"
            assert conversation_of(device)[-1] == ("user", "two")
            with pytest.raises(openai.PermissionDeniedError):
                await client.responses.create(
                    model="auto", **more[kind], extra_headers={"x-causeway-prefer": "only_cloud"}
                )
            last = await client.responses.create(model="auto", input="three", previous_response_id=raw.parse().id)
            assert last.output_text == ANSWER
        assert device.cloud.bodies == []
        assert b"4711" not in written(tmp_path)


@pytest.mark.parametrize("headers", [{"x-causeway-tags": "private"}, {"x-causeway-prefer": "only_on_device"}])
@pytest.mark.parametrize("how", ["new", "added"])
async def test_items_that_are_added_privately_stay_on_the_device(
    tmp_path: Path, headers: dict[str, str], how: str
) -> None:
    items: Any = [{"role": "user", "content": SECRET}]
    async with storing(tmp_path) as (device, _), client_of(device, tags="cloud") as client:
        talk = await client.conversations.create(**({"items": items, "extra_headers": headers} if how == "new" else {}))
        if how == "added":
            await client.conversations.items.create(talk.id, items=items, extra_headers=headers)
        raw = await client.responses.with_raw_response.create(model="auto", input="two", conversation=talk.id)
        assert raw.headers["x-causeway-route"] == "edge"
        assert conversation_of(device) == [("user", SECRET), ("user", "two")]
        assert device.cloud.bodies == []
        assert b"4711" not in written(tmp_path)


async def test_a_private_conversation_is_compacted_and_stays_on_the_device(tmp_path: Path) -> None:
    """The added item itself is bound: nothing else of the request tells that it is private."""
    async with storing(tmp_path) as (device, _):
        async with client_of(device, tags="private") as client:
            made = await client.responses.create(model="auto", input=SECRET, store=True)
            compacted = await client.responses.compact(model="auto", previous_response_id=made.id)
        items: Any = [item.to_dict() for item in compacted.output]
        assert [item["type"] for item in items] == ["compaction"]
        fields: Any = {"model": "auto", "input": [*items, {"role": "user", "content": "two"}]}
        async with client_of(device, tags="cloud") as client:
            raw = await client.responses.with_raw_response.create(**fields)
            assert raw.headers["x-causeway-route"] == "edge"
            assert conversation_of(device)[-2:] == [("assistant", ANSWER), ("user", "two")]
            prefer = {"x-causeway-prefer": "only_cloud"}
            with pytest.raises(openai.BadRequestError):
                await client.responses.create(**fields, extra_headers=prefer)
            again = await client.responses.compact(model="auto", input=fields["input"])
            fields["input"] = [again.output[0].to_dict(), {"role": "user", "content": "three"}]
            raw = await client.responses.with_raw_response.create(**fields)
            assert raw.headers["x-causeway-route"] == "edge"
        assert device.cloud.bodies == []
        assert b"4711" not in written(tmp_path)


async def test_a_private_response_is_not_made_in_the_background(tmp_path: Path) -> None:
    """A job waits on the disk."""
    async with storing(tmp_path) as (device, _), client_of(device, tags="private") as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model="auto", input=SECRET, background=True)
        assert refused.value.param == "background"
    assert b"4711" not in written(tmp_path)
