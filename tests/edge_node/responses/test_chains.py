"""Stored responses on a device, and the chains and conversations that go on from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from causeway_server.edge_node.config.schema import ResponsesConfig
from causeway_server.edge_node.storage.responses import FILE

from .support import client_of, conversation_of, storing

ANSWER = "edge says so"


async def test_a_response_is_stored_if_asked_and_read_again(tmp_path: Path) -> None:
    async with storing(tmp_path) as (_, client):
        made = await client.responses.create(model="auto", input="hello", store=True, metadata={"a": "b"})
        assert made.to_dict()["store"] is True
        read = await client.responses.retrieve(made.id)
        assert read.to_dict() == made.to_dict()
        items = await client.responses.input_items.list(made.id)
        assert [item.to_dict() for item in items.data] == [
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": "hello"}],
                "id": items.data[0].to_dict()["id"],
                "status": "completed",
            }
        ]
        await client.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(made.id)


@pytest.mark.parametrize("store", [None, False])
async def test_nothing_is_stored_otherwise(tmp_path: Path, store: bool | None) -> None:
    async with storing(tmp_path) as (_, client):
        fields: dict[str, Any] = {} if store is None else {"store": store}
        made = await client.responses.create(model="auto", input="hello", **fields)
        assert made.to_dict()["store"] is False
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(made.id)
        with pytest.raises(openai.NotFoundError) as refused:
            await client.responses.create(model="auto", input="and?", previous_response_id=made.id)
        assert refused.value.param == "previous_response_id"
    assert not (tmp_path / "state" / FILE).exists()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_chain_goes_on_over_a_restart(tmp_path: Path, stream: bool) -> None:
    async def ask(client: openai.AsyncOpenAI, text: str, previous: str | None) -> str:
        fields: dict[str, Any] = {"model": "auto", "input": text, "store": True, "previous_response_id": previous}
        if not stream:
            return (await client.responses.create(**fields)).id
        async with client.responses.stream(**fields) as events:
            async for _ in events:
                pass
            return (await events.get_final_response()).id

    async with storing(tmp_path) as (_, client):
        second = await ask(client, "two", await ask(client, "one", None))
    async with storing(tmp_path) as (device, client):
        third = await ask(client, "three", second)
        said = [("user", "one"), ("assistant", ANSWER), ("user", "two"), ("assistant", ANSWER), ("user", "three")]
        assert conversation_of(device) == said
        items = await client.responses.input_items.list(third, order="asc", limit=2)
        assert [item.to_dict()["role"] async for item in items] == [role for role, _ in said]


async def test_a_conversation_goes_on_from_its_summary(tmp_path: Path) -> None:
    async with storing(tmp_path) as (device, client):
        first = await client.responses.create(model="auto", input="one", store=True)
        compacted = await client.responses.compact(model="auto", input="two", previous_response_id=first.id)
        assert compacted.object == "response.compaction"
        assert compacted.usage.total_tokens > 0
        said = conversation_of(device)
        assert said[:3] == [("user", "one"), ("assistant", ANSWER), ("user", "two")]
        assert said[3][1].startswith("Summarize")
        window: Any = [item.to_dict() for item in compacted.output]
        stored = await client.responses.create(
            model="auto", input=[*window, {"role": "user", "content": "3"}], store=True
        )
        assert conversation_of(device)[1:] == [("assistant", ANSWER), ("user", "3")]
        await client.responses.create(model="auto", input="4", previous_response_id=stored.id)
        assert [text for _, text in conversation_of(device)][1:] == [ANSWER, "3", ANSWER, "4"]
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(compacted.id)
        device.engine.fault = "unfinished"
        with pytest.raises(openai.APIStatusError):
            await client.responses.compact(model="small", input="one")


async def test_a_tool_call_of_a_stored_response_gets_its_result(tmp_path: Path) -> None:
    """Items are also named by their id alone, as the AI SDK does."""
    async with storing(tmp_path) as (device, client):
        made = await client.responses.create(model="auto", input="one", store=True)
        named: Any = [{"type": "item_reference", "id": made.output[0].id}, {"role": "user", "content": "two"}]
        await client.responses.create(model="auto", input=named)
        assert conversation_of(device) == [("assistant", ANSWER), ("user", "two")]
        named[0]["id"] = f"msg_{'0' * 24}_0"
        with pytest.raises(openai.NotFoundError) as refused:
            await client.responses.create(model="auto", input=named)
        assert refused.value.param == "input[0].id"


async def test_another_client_has_none_of_it(tmp_path: Path) -> None:
    """A foreign id gets the same 404 as one that never was."""
    async with storing(tmp_path) as (device, client), client_of(device, "till") as other:
        made = await client.responses.create(model="auto", input="one", store=True)
        talk = await client.conversations.create(items=[{"type": "message", "role": "user", "content": "hi"}])
        absent = {"resp": f"resp_{'0' * 24}", "conv": f"conv_{'0' * 24}"}

        async def fault(call: Any, name: str) -> str:
            with pytest.raises(openai.NotFoundError) as refused:
                await call(name)
            return str(refused.value.body).replace(name, "ID")

        def follow(name: str) -> Any:
            return other.responses.create(model="auto", input="x", previous_response_id=name)

        def join(name: str) -> Any:
            return other.responses.create(model="auto", input="x", conversation=name)

        responses, talks = other.responses, other.conversations
        of_response: list[Any] = [responses.retrieve, responses.delete, responses.cancel, responses.input_items.list]
        for call in (*of_response, follow):
            assert await fault(call, made.id) == await fault(call, absent["resp"])
        of_talk: list[Any] = [talks.retrieve, talks.delete, talks.items.list]
        for call in (*of_talk, join):
            assert await fault(call, talk.id) == await fault(call, absent["conv"])
        assert (await client.responses.retrieve(made.id)).id == made.id


async def test_a_conversation_is_kept_and_goes_on(tmp_path: Path) -> None:
    async with storing(tmp_path) as (device, client):
        talk = await client.conversations.create(
            items=[{"type": "message", "role": "user", "content": "one"}], metadata={"topic": "x"}
        )
        made = await client.responses.create(model="auto", input="two", conversation=talk.id)
        assert made.conversation is not None
        assert made.conversation.id == talk.id
        added = await client.conversations.items.create(
            talk.id, items=[{"type": "message", "role": "user", "content": "three"}]
        )
        await client.conversations.items.delete(added.data[0].id or "", conversation_id=talk.id)
        await client.responses.create(model="auto", input="four", conversation={"id": talk.id})
        said = [("user", "one"), ("user", "two"), ("assistant", ANSWER), ("user", "four")]
        assert conversation_of(device) == said
        items = [item async for item in client.conversations.items.list(talk.id, order="asc", limit=3)]
        assert len(items) == len(said) + 1
        one = await client.conversations.items.retrieve(items[2].id or "", conversation_id=talk.id)
        assert one.to_dict() == items[2].to_dict()
        changed = await client.conversations.update(talk.id, metadata={"topic": "y"})
        assert changed.metadata == {"topic": "y"}
        assert (await client.responses.retrieve(made.id)).output_text == ANSWER
        assert (await client.conversations.delete(talk.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(made.id)


async def test_a_broken_answer_is_not_stored(tmp_path: Path) -> None:
    async with storing(tmp_path) as (device, client):
        talk = await client.conversations.create()
        device.engine.fault = "die"
        stream = await client.responses.create(model="auto", input="one", conversation=talk.id, stream=True)
        with pytest.raises(openai.APIError):
            [_ async for _ in stream]
        assert (await client.conversations.items.list(talk.id)).data == []


FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"store": False, "background": True}, "store"),
    ({"store": False, "conversation": "conv_1"}, "store"),
    ({"conversation": "conv_1", "previous_response_id": "resp_1"}, "previous_response_id"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"store": True, "temperature": 9}, "temperature"),
    ({"store": True, "truncation": "auto"}, "truncation"),
]


@pytest.mark.parametrize(("fields", "param"), FIELDS)
async def test_a_field_that_cannot_be_honoured_is_named(tmp_path: Path, fields: dict[str, Any], param: str) -> None:
    async with storing(tmp_path) as (_, client):
        with pytest.raises(openai.APIStatusError) as refused:
            await client.responses.create(model="auto", input="one", **fields)
        assert refused.value.param == param
        assert refused.value.status_code in (400, 404)


async def test_a_clients_oldest_responses_give_way(tmp_path: Path) -> None:
    config = ResponsesConfig(max_responses=2)
    async with storing(tmp_path, responses=config) as (device, client), client_of(device, "till") as other:
        foreign = await other.responses.create(model="auto", input="x", store=True)
        made = [await client.responses.create(model="auto", input=text, store=True) for text in ("1", "2", "3")]
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(made[0].id)
        for response in made[1:]:
            assert (await client.responses.retrieve(response.id)).id == response.id
        assert (await other.responses.retrieve(foreign.id)).id == foreign.id


async def test_a_response_that_is_too_large_is_answered_and_not_stored_unless_that_was_promised(tmp_path: Path) -> None:
    async with storing(tmp_path, responses=ResponsesConfig(max_bytes=500)) as (_, client):
        with pytest.raises(openai.APIStatusError) as refused:
            await client.responses.create(model="auto", input="x" * 600, store=True)
        assert refused.value.status_code == 413


async def test_responses_of_all_clients_together_are_bounded(tmp_path: Path) -> None:
    config = ResponsesConfig(max_total_bytes=3500)
    async with storing(tmp_path, responses=config) as (device, client), client_of(device, "till") as other:
        first = await other.responses.create(model="auto", input="x" * 1000, store=True)
        last = await client.responses.create(model="auto", input="x" * 1000, store=True)
        assert (await client.responses.retrieve(last.id)).id == last.id
        with pytest.raises(openai.NotFoundError):
            await other.responses.retrieve(first.id)
