"""The SDK against the daemon itself, with scripted generators behind it: both sides mean the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from causeway_sdk import AsyncCauseway, Causeway, CausewayAPIError, CausewayTimeout, Job, Usage
from causeway_server.edge_node.config.schema import KeyConfig, ServerConfig
from tests.edge_node.device import Device, running
from tests.waiting import until


@pytest.fixture
async def device(tmp_path: Path) -> AsyncIterator[Device]:
    async with running(tmp_path) as started:
        yield started


@pytest.fixture
async def causeway(device: Device) -> AsyncIterator[AsyncCauseway]:
    async with AsyncCauseway(f"http://127.0.0.1:{device.app.port}") as client:
        yield client


async def test_an_answer_carries_the_daemons_decision(device: Device, causeway: AsyncCauseway) -> None:
    """Headers, record and model list say the same."""
    answer = await causeway.chat("hello")
    assert answer.text == "edge says so"
    assert (answer.decision.route, answer.decision.target, answer.decision.cache) == ("edge", "small", "bypass")
    assert answer.decision.policy.startswith("test@")
    assert not answer.decision.degraded
    record = await causeway.decision(answer.decision.id)
    assert record["id"] == answer.decision.id
    assert [model.id for model in await causeway.models()] == ["auto", "small", "large"]


async def test_a_stream_has_its_decision_and_usage(device: Device, causeway: AsyncCauseway) -> None:
    """The decision is there with the first piece, the usage with the last."""
    async with await causeway.chat("hello", stream=True, tags=["cloud"]) as stream:
        assert stream.decision.route == "cloud"
        answer = await stream.answer()
    assert answer.text == "cloud says so"
    assert answer.usage == Usage(7, 3, 10)


async def test_the_same_question_comes_from_the_cache(device: Device, causeway: AsyncCauseway) -> None:
    """Whole and streamed, with the cache named as the route."""
    await causeway.chat("hello", temperature=0.0)
    whole = await causeway.chat("hello", temperature=0.0)
    async with await causeway.chat("hello", temperature=0.0, stream=True) as stream:
        streamed = await stream.answer()
    for answer in (whole, streamed):
        assert (answer.text, answer.decision.route, answer.decision.cache) == ("edge says so", "cache", "hit")


async def test_wishes_reach_the_policy(device: Device, causeway: AsyncCauseway) -> None:
    """`prefer` and tags of the SDK narrow the route; nothing of them is sent to the cloud."""
    forced = await causeway.chat("hello", prefer="only_cloud")
    kept = await causeway.chat("hello", tags=["private", "cloud"])
    assert (forced.decision.route, kept.decision.route) == ("cloud", "edge")
    assert "causeway" not in device.cloud.bodies[0]
    with pytest.raises(CausewayAPIError) as caught:
        await causeway.chat("hello", prefer="only_cloud", tags=["private"])
    assert (caught.value.status, caught.value.code) == (503, "no_route")


async def test_route_explains_without_running(device: Device, causeway: AsyncCauseway) -> None:
    """The explanation names the rule; no generator was asked."""
    explained = await causeway.route("hello", tags=["cloud"])
    assert explained["decision"]["rule"] == "cloud-first"  # type: ignore[index]
    assert (device.engine.calls, device.cloud.bodies) == ([], [])


async def test_leaving_a_stream_frees_the_slot(device: Device, causeway: AsyncCauseway) -> None:
    """The daemon stops the engine's work when the SDK closes its stream."""
    device.engine.fault = "drip"
    async with await causeway.chat("hello", stream=True, tags=["edge"]) as stream:
        async for _ in stream:
            break
    await until(lambda: device.engine.running == 0)
    device.assert_nothing_leaks()


@pytest.mark.slow
async def test_a_deadline_is_the_daemons_too(device: Device, causeway: AsyncCauseway) -> None:
    """What is left travels with the ask, and the daemon's own refusal comes back."""
    device.engine.gate = asyncio.Event()
    device.cloud.gate = asyncio.Event()
    with pytest.raises(CausewayAPIError) as caught:
        await causeway.chat("hello", deadline_s=1.0)
    assert caught.value.status in (503, 504)


async def test_a_break_after_the_first_byte_is_an_error(device: Device, causeway: AsyncCauseway) -> None:
    """The daemon's error event is the SDK's exception, with its code."""
    device.engine.fault = "die"
    with pytest.raises(CausewayAPIError) as caught:
        async with await causeway.chat("hello", stream=True, tags=["edge"]) as stream:
            await stream.answer()
    assert caught.value.code == "engine_crashed"


async def test_keys_and_the_unix_socket(tmp_path: Path) -> None:
    """The sync client, over the socket, with and without the key."""
    key = KeyConfig("kiosk", "2c70e12b7a0646f92279f427c7b38e7334d8e5389cff167a1dc30e73f826b683")  # sha256 of "key"
    server = ServerConfig(port=0, socket=str(tmp_path / "edge.sock"), keys=(key,))
    async with running(tmp_path, server=server):

        def ask() -> str:
            url = f"unix://{tmp_path / 'edge.sock'}"
            with Causeway(url) as stranger, pytest.raises(CausewayAPIError, match="API key"):
                stranger.chat("hello")
            with Causeway(url, api_key="key") as causeway:
                return causeway.chat("hello").text

        assert await asyncio.to_thread(ask) == "edge says so"


async def test_embeddings_and_completions(device: Device, causeway: AsyncCauseway) -> None:
    """The rest of the surface, typed."""
    vectors = await causeway.embed(["abc"])
    assert vectors.vectors == ((3.0, 1.0),)
    assert vectors.decision.route == "edge"
    assert (await causeway.complete("hello")).text == "edge says so"


async def test_jobs_are_submitted_waited_for_and_read(device: Device, causeway: AsyncCauseway) -> None:
    """The same key is the same job, and each ends with its answer."""
    first = await causeway.submit("hello", key="k1", priority="interactive", deadline_s=60)
    assert (await causeway.submit("hello", key="k1", priority="interactive", deadline_s=60)).id == first.id
    second = await causeway.submit("hello", tags=["edge"])
    found = {job.id: job async for job in causeway.results([first, second.id], timeout_s=60)}
    assert found.keys() == {first.id, second.id}
    answer = found[first.id].answer
    assert answer is not None
    assert (answer.text, answer.decision.route) == ("edge says so", "edge")
    assert [job.id for job in await causeway.jobs(limit=1)] == [second.id]
    late = await causeway.submit("hello", not_before_s=3600)
    assert late.webhook == ""
    with pytest.raises(CausewayTimeout):
        await causeway.wait(late, timeout_s=0)
    assert (await causeway.cancel(late)).status == "cancelled"
    assert (await causeway.wait(late)).ended
    await causeway.purge(late)
    with pytest.raises(CausewayAPIError) as refused:
        await causeway.job(late.id)
    assert refused.value.status == 404


async def test_a_job_names_its_webhook_in_both_clients(device: Device, causeway: AsyncCauseway) -> None:
    """A URL into the device is refused with the reason, unless the device allows it."""
    url = "https://example.com/hook"
    job = await causeway.submit("hello", webhook=url, not_before_s=3600)
    assert (job.webhook, job.webhook_status) == (url, "")

    def ask() -> Job:
        with Causeway(f"http://127.0.0.1:{device.app.port}") as client:
            return client.submit("hello", webhook=url, not_before_s=3600)

    assert (await asyncio.to_thread(ask)).webhook == url
    with pytest.raises(CausewayAPIError, match="loopback") as refused:
        await causeway.submit("hello", webhook="https://127.0.0.1/hook")
    assert (refused.value.status, refused.value.code) == (400, "webhook_refused")
