"""Stored responses at a gateway through the official client: by default, in chains, and in the background."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import openai
import pytest

from causeway_server.cloud_pool.core.subject import ErasureSubject
from causeway_server.cloud_pool.erasure import Erasure, job_kinds
from causeway_server.cloud_pool.storage.stores import JobStores
from causeway_server.router.openai.responses.compaction import Compacted
from tests.cloud_pool.jobs.conftest import until
from tests.redis_server import RedisServer

from .conftest import TOKENS, StoringGateway

pytestmark = [pytest.mark.redis, pytest.mark.slow]
ANSWER = "cloud says so"


async def test_a_response_is_stored_by_default_and_goes_on(gateway: StoringGateway) -> None:
    client = gateway.client
    first = await client.responses.create(model="large", input="one")
    assert first.to_dict()["store"] is True
    assert (await client.responses.retrieve(first.id)).to_dict() == first.to_dict()
    async with client.responses.stream(model="large", input="two", previous_response_id=first.id) as events:
        kinds = [event.type async for event in events]
        second = await events.get_final_response()
    assert kinds[-1] == "response.completed"
    said = [("user", "one"), ("assistant", ANSWER), ("user", "two")]
    assert gateway.asked == said
    items = await client.responses.input_items.list(second.id, order="asc")
    assert [item.to_dict()["role"] for item in items.data] == [role for role, _ in said]
    await client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError) as refused:
        await client.responses.create(model="large", input="three", previous_response_id=second.id)
    assert first.id in refused.value.message


async def test_a_key_in_anthropics_header_is_the_caller_at_every_path(gateway: StoringGateway) -> None:
    """And two different keys are refused."""
    url, key, other = gateway.app.url, {"x-api-key": TOKENS["till"]}, {"Authorization": f"Bearer {TOKENS['kiosk']}"}
    async with aiohttp.ClientSession() as http:
        async with http.post(f"{url}/responses", headers=key, json={"model": "large", "input": "one"}) as made:
            assert made.status == 200
            name = (await made.json())["id"]
        async with http.get(f"{url}/responses/{name}", headers=key) as read:
            assert read.status == 200
        async with http.post(f"{url}/responses", headers=key | other, json={"model": "large", "input": "one"}) as two:
            assert two.status == 400


async def test_nothing_is_stored_if_the_client_says_so(gateway: StoringGateway) -> None:
    made = await gateway.client.responses.create(model="large", input="one", store=False)
    assert made.to_dict()["store"] is False
    with pytest.raises(openai.NotFoundError):
        await gateway.client.responses.retrieve(made.id)


async def test_a_conversation_goes_on_and_another_client_has_none_of_it(gateway: StoringGateway) -> None:
    client, other = gateway.client, gateway.other
    talk = await client.conversations.create(items=[{"type": "message", "role": "user", "content": "one"}])
    made = await client.responses.create(model="large", input="two", conversation=talk.id)
    await client.responses.create(model="large", input="three", conversation=talk.id)
    assert gateway.asked == [("user", "one"), ("user", "two"), ("assistant", ANSWER), ("user", "three")]

    async def fault(call: Any, name: str) -> str:
        with pytest.raises(openai.NotFoundError) as refused:
            await call(name)
        return str(refused.value.body).replace(name, "ID")

    def follow(name: str) -> Any:
        return other.responses.create(model="large", input="x", previous_response_id=name)

    of_response: list[Any] = [other.responses.retrieve, other.responses.delete, other.responses.cancel]
    for call in (*of_response, follow):
        assert await fault(call, made.id) == await fault(call, f"resp_{'0' * 48}")
    of_talk: list[Any] = [other.conversations.retrieve, other.conversations.delete, other.conversations.items.list]
    for call in (*of_talk, lambda name: other.responses.create(model="large", input="x", conversation=name)):
        assert await fault(call, talk.id) == await fault(call, f"conv_{'0' * 24}")
    assert len((await client.conversations.items.list(talk.id)).data) == 5
    await client.conversations.delete(talk.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(made.id)


@pytest.mark.usefixtures("working")
async def test_a_response_is_made_in_the_background_and_followed(gateway: StoringGateway) -> None:
    client = gateway.client
    gateway.cloud.gate = asyncio.Event()
    first: list[dict[str, object]] = []
    stream = await client.responses.create(model="large", input="one", background=True, stream=True)
    async for event in stream:
        first.append(event.to_dict())
        if len(first) == 2:
            break  # the client leaves, the response is made
    await stream.close()
    name = str(first[0]["response"]["id"])  # type: ignore[index]
    with pytest.raises(openai.ConflictError):
        await client.responses.create(model="large", input="two", previous_response_id=name)
    gateway.cloud.gate.set()
    rest = [event.to_dict() async for event in await client.responses.retrieve(name, stream=True, starting_after=1)]
    whole = [event.to_dict() async for event in await client.responses.retrieve(name, stream=True)]
    assert first + rest == whole
    assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
    read = await client.responses.retrieve(name)
    assert (read.status, read.output_text, read.id) == ("completed", ANSWER, name)
    await client.responses.create(model="large", input="two", previous_response_id=name)
    assert gateway.asked == [("user", "one"), ("assistant", ANSWER), ("user", "two")]


@pytest.mark.usefixtures("working")
async def test_text_arrives_while_it_is_made(gateway: StoringGateway) -> None:
    """Another connection goes on after any piece."""
    client = gateway.client
    gateway.cloud.rest = asyncio.Event()
    events: list[dict[str, Any]] = []

    async def follow(stream: Any, delta: str) -> None:
        async with asyncio.timeout(30):
            async for event in stream:
                events.append(event.to_dict())
                if events[-1].get("delta") == delta:
                    break
        await stream.close()

    await follow(await client.responses.create(model="large", input="one", background=True, stream=True), "cloud ")
    name = str(events[0]["response"]["id"])
    assert (await client.responses.retrieve(name)).status == "in_progress"
    number = events[-1]["sequence_number"]
    await follow(await client.responses.retrieve(name, stream=True, starting_after=number), "says ")
    gateway.cloud.rest.set()
    number = events[-1]["sequence_number"]
    rest = [
        event.to_dict() async for event in await client.responses.retrieve(name, stream=True, starting_after=number)
    ]
    whole: list[Any] = [event.to_dict() async for event in await client.responses.retrieve(name, stream=True)]
    assert events + rest == whole
    assert [event["delta"] for event in whole if event["type"].endswith("delta")] == ["cloud ", "says ", "so"]


@pytest.mark.usefixtures("working")
async def test_an_answer_that_nobody_asked_for_outlives_its_job(gateway: StoringGateway) -> None:
    client = gateway.client
    made = await client.responses.create(model="large", input="one", background=True)
    stores = JobStores.open(gateway.config.jobs)
    try:
        (job,) = await stores.jobs.list_owned("default/kiosk")

        async def is_settled() -> bool:
            await asyncio.sleep(0.05)  # the worker shares the loop
            return b"pending" not in (await stores.responses.read("default/kiosk", [made.id]))[0]

        await until(is_settled)
        for kind in ("job", "result"):
            await stores.database.command("UNLINK", stores.database.key(kind, job.id))
    finally:
        await stores.close()
    read = await client.responses.retrieve(made.id)
    assert (read.status, read.output_text) == ("completed", ANSWER)
    await client.responses.create(model="large", input="two", previous_response_id=made.id)
    assert gateway.asked == [("user", "one"), ("assistant", ANSWER), ("user", "two")]


async def test_what_is_deleted_while_its_job_ends_stays_deleted(gateway: StoringGateway) -> None:
    stores = JobStores.open(gateway.config.jobs)
    try:
        for only_known in (True, False):
            await stores.responses.put(
                "default/kiosk", f"resp_{'0' * 24}", b"x", private=False, user="", only_known=only_known
            )
            there = (await stores.responses.read("default/kiosk", [f"resp_{'0' * 24}"]))[0]
            assert there == (b"" if only_known else b"x")
    finally:
        await stores.close()


async def test_a_conversation_goes_on_from_its_summary(gateway: StoringGateway) -> None:
    client = gateway.client
    first = await client.responses.create(model="large", input="one")
    compacted = await client.responses.compact(model="large", previous_response_id=first.id)
    assert [text for _, text in gateway.asked][:2] == ["one", ANSWER]
    items: Any = [*(item.to_dict() for item in compacted.output), {"role": "user", "content": "two"}]
    await client.responses.create(model="large", input=items)
    assert gateway.asked[1:] == [("assistant", ANSWER), ("user", "two")]
    with pytest.raises(openai.NotFoundError):
        await gateway.other.responses.compact(model="large", previous_response_id=first.id)
    private = Compacted("secret", private=True).seal()
    items = [{"type": "compaction", "encrypted_content": private}, {"role": "user", "content": "two"}]
    with pytest.raises(openai.APIStatusError) as refused:
        await client.responses.create(model="large", input=items)
    assert refused.value.status_code == 403
    assert "secret" not in str(gateway.cloud.bodies)


async def test_a_response_in_the_background_is_cancelled_and_the_same_under_its_key(gateway: StoringGateway) -> None:
    client, key = gateway.client, {"Idempotency-Key": "k"}
    fields: dict[str, Any] = {"model": "large", "background": True, "extra_headers": key}
    made = await client.responses.create(input="one", **fields)
    assert (await client.responses.create(input="one", **fields)).id == made.id
    with pytest.raises(openai.ConflictError):
        await client.responses.create(input="two", **fields)
    assert (await client.responses.cancel(made.id)).status == "cancelled"
    assert (await client.responses.retrieve(made.id)).status == "cancelled"
    assert [body for body in gateway.cloud.bodies if "one" in str(body)] == []


@pytest.mark.usefixtures("working")
async def test_a_response_that_fails_in_the_background_tells_why(gateway: StoringGateway) -> None:
    gateway.cloud.status, gateway.cloud.error = 400, {"message": "no such thing", "code": "invalid_value"}
    made = await gateway.client.responses.create(model="large", input="one", background=True)
    kinds = [event.type async for event in await gateway.client.responses.retrieve(made.id, stream=True)]
    assert kinds[-1] == "response.failed"
    failed = await gateway.client.responses.retrieve(made.id)
    assert failed.status == "failed"
    assert failed.error is not None


@pytest.mark.parametrize("end", ["queued", "answered"])
async def test_a_response_whose_job_has_expired_is_not_found(gateway: StoringGateway, end: str) -> None:
    client = gateway.client
    made = await client.responses.create(model="large", input="one", background=True)
    assert (await client.responses.retrieve(made.id)).status == "queued"
    stores = JobStores.open(gateway.config.jobs)
    try:
        if end == "answered":
            (record,) = (await stores.jobs.claim("w", "large", ["standard"])).records
            await stores.jobs.succeed(record.id, record.fence, b"{}")
        (job,) = await stores.jobs.list_owned("default/kiosk")
        kind = "job" if end == "queued" else "result"
        assert await stores.database.command("UNLINK", stores.database.key(kind, job.id)) == 1
    finally:
        await stores.close()
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(model="large", input="two", previous_response_id=made.id)
    assert [body for body in gateway.cloud.bodies if "two" in str(body)] == []


async def test_a_tenants_oldest_responses_give_way(gateway: StoringGateway) -> None:
    client = gateway.client
    made = [(await client.responses.create(model="large", input=f"{at}")).id for at in range(10)]
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(made[1])
    assert (await client.responses.retrieve(made[2])).id == made[2]
    big = [(await client.responses.create(model="large", input="x" * 6000)).id for _ in range(3)]
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(big[0])
    assert (await client.responses.retrieve(big[2])).id == big[2]


async def test_a_response_that_is_too_large_is_answered_and_says_that_it_is_not_stored(gateway: StoringGateway) -> None:
    """A client that asks for it by name gets an error."""
    made = await gateway.client.responses.create(model="large", input="x" * 30_000)
    assert made.output_text == ANSWER
    assert made.to_dict()["store"] is False
    with pytest.raises(openai.APIStatusError) as refused:
        await gateway.client.responses.create(model="large", input="x" * 30_000, store=True)
    assert refused.value.status_code == 413


async def test_without_redis_answers_go_on_and_say_that_they_are_not_stored(
    gateway: StoringGateway, redis_server: RedisServer
) -> None:
    with redis_server.paused():
        made = await gateway.client.responses.create(model="large", input="one", timeout=60)
        assert (made.output_text, made.to_dict()["store"]) == (ANSWER, False)
        with pytest.raises(openai.APIStatusError) as refused:
            await gateway.client.responses.create(model="large", input="one", store=True, timeout=60)
        assert refused.value.status_code == 503


async def test_responses_are_erased_with_their_client_or_user(gateway: StoringGateway) -> None:
    client = gateway.client
    of_user = await client.responses.create(model="large", input="one", user="ann")
    plain = await client.responses.create(model="large", input="one")
    foreign = await gateway.other.responses.create(model="large", input="one", user="bob")
    stores = JobStores.open(gateway.config.jobs)
    try:
        erasure = Erasure(stores.database, job_kinds(stores))
        receipt = await erasure.erase(ErasureSubject("default", user="ann"))
        assert receipt.erased["responses"] == 1
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(of_user.id)
        receipt = await erasure.erase(ErasureSubject("default", device="kiosk"))
        assert receipt.erased["responses"] == 1
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(plain.id)
        assert (await gateway.other.responses.retrieve(foreign.id)).id == foreign.id
    finally:
        await stores.close()
