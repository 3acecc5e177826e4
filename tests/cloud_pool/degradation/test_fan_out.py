"""Requests for many answers: each is a sequence with a permit and a call of its own."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import msgspec
import pytest

from causeway_server.cloud_pool.tiers.config import TierConfig
from causeway_server.cloud_pool.tiers.tier import Tier
from causeway_server.router.errors import CausewayError, CloudFailed, InvalidRequest, QueueFull, StreamBroken
from causeway_server.router.types import Request, Sampling, Usage

from .scripted import Bed, Hung, ScriptedTriton

PERMITS = 4


def fan_out(n: int = 16, prompts: int = 8, *, seed: int | None = None) -> Request:
    return Request(
        kind="completion",
        model="large",
        prompts=tuple(f"prompt {at}" for at in range(prompts)),
        n=n,
        max_tokens=100,
        sampling=Sampling(seed=seed),
    )


def bed_of(*script: str | Exception | type[Hung], permits: int = PERMITS, max_queued: int = 200) -> Bed:
    return Bed({"large": ScriptedTriton(*script)}, permits=permits, max_queued=max_queued)


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_every_answer_is_complete() -> None:
    bed = bed_of("one ", "two ")
    _, chunks = await bed.send(bed.call(fan_out()))
    texts = dict.fromkeys(range(128), "")
    for chunk in chunks:
        texts[chunk.index] += chunk.text
    assert set(texts.values()) == {"one two "}
    assert sorted(chunk.index for chunk in chunks if chunk.finish_reason) == list(range(128))
    assert chunks[-1].usage == Usage(8 * 3, 128 * 2)  # each prompt is billed once
    assert bed.is_free


async def test_no_more_sequences_are_sent_than_there_are_permits() -> None:
    """As one permit, its 128 sequences would wait inside Triton in front of all other tenants."""
    bed = bed_of(Hung)
    triton, task = bed.tritons["large"], asyncio.ensure_future(bed.send(bed.call(fan_out())))
    await triton.hangs.wait()
    await asyncio.sleep(0)
    assert sum(request.parameters.n for request in triton.requests) <= PERMITS
    assert bed.admissions["large"].scheduler.waiting == 128 - PERMITS
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert bed.is_free


async def test_each_sequence_has_a_seed_of_its_own() -> None:
    bed = bed_of("one ")
    await bed.send(bed.call(fan_out(3, 2, seed=7)))
    sent = {(request.prompt, request.parameters.seed) for request in bed.tritons["large"].requests}
    assert sent == {("prompt 0", 7), ("prompt 0", 8), ("prompt 0", 9)} | {
        ("prompt 1", 10),
        ("prompt 1", 11),
        ("prompt 1", 12),
    }


@pytest.mark.parametrize("error", [StreamBroken("died", phase="stream"), QueueFull("full", retry_after_s=1.0)])
@pytest.mark.parametrize("begun", [False, True])
async def test_a_sequence_that_fails_ends_all_and_gives_every_permit_back(error: CausewayError, begun: bool) -> None:
    bed = bed_of(*(("one ", error) if begun else (error,)))
    with pytest.raises(type(error)):
        await bed.send(bed.call(fan_out()))
    assert bed.is_free


@pytest.mark.parametrize("begun", [False, True])
async def test_a_fault_of_ours_in_one_sequence_ends_all_and_says_no_more_than_its_kind(begun: bool) -> None:
    fault = ValueError("bad frame: the secret prompt")
    bed = bed_of(*(("one ", fault) if begun else (fault,)))
    with pytest.raises(CloudFailed, match=r"An answer failed: ValueError\.") as raised:
        await bed.send(bed.call(fan_out()))
    assert "secret" not in str(raised.value)
    assert bed.is_free


@pytest.mark.parametrize("pieces_read", [0, 1, 5])
async def test_a_client_that_leaves_gives_every_permit_back(pieces_read: int) -> None:
    bed = bed_of("one ", "two ")
    async with aclosing(bed.service.answer(bed.call(fan_out()))) as pieces:
        for _ in range(pieces_read):
            await anext(pieces)
    assert bed.is_free


async def test_a_client_that_leaves_while_its_sequences_wait_leaves_nothing() -> None:
    bed = bed_of(Hung, permits=1)
    first = asyncio.ensure_future(bed.send())
    await bed.tritons["large"].hangs.wait()
    waiting = asyncio.ensure_future(bed.send(bed.call(fan_out())))
    await settle()
    assert bed.admissions["large"].scheduler.waiting
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert (bed.admissions["large"].scheduler.running, bed.admissions["large"].scheduler.waiting) == (1, 0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert bed.is_free


async def test_another_tenants_chat_is_answered_before_the_fan_out_has_ended() -> None:
    bed = bed_of("one ", "two ")
    order: list[str] = []

    async def send(tenant: str, request: Request | None = None) -> None:
        await bed.send(bed.call(request, tenant=tenant) if request else bed.call(tenant=tenant))
        order.append(tenant)

    loud = asyncio.ensure_future(send("loud", fan_out()))
    await settle()
    assert bed.admissions["large"].scheduler.waiting
    await asyncio.gather(loud, send("quiet"))
    assert order == ["quiet", "loud"]


async def test_more_than_a_tier_takes_is_refused_by_name_before_anything_is_sent() -> None:
    bed = bed_of("one ")
    with pytest.raises(InvalidRequest) as refused:
        await bed.send(bed.call(fan_out(16, 64)))
    assert refused.value.message == (
        "The request has 1024 sequences (64 prompts × n=16), but the tier 'large' takes at most 128 sequences in "
        "one request (max_sequences). Send several requests."
    )
    assert refused.value.param == "prompt"
    assert not bed.tritons["large"].requests
    assert bed.is_free


async def test_a_tier_that_takes_fewer_sequences_is_no_fallback() -> None:
    tritons = {"large": ScriptedTriton(StreamBroken("gone")), "medium": ScriptedTriton()}
    bed = Bed(tritons, max_queued=200, max_sequences={"medium": 100})
    with pytest.raises(StreamBroken):
        await bed.send(bed.call(fan_out(16, 8)))
    assert not tritons["medium"].requests
    head, _ = await bed.send(bed.call(fan_out(16, 4)))
    assert head.model == "medium"
    assert bed.is_free


async def test_the_inputs_of_a_list_to_embed_are_sequences_too() -> None:
    """A list longer than the tier takes at once is divided."""
    bed = bed_of("[0.5]", permits=2, max_queued=3)
    tier = Tier(TierConfig(name="large", can=("embedding",), max_sequences=3), bed.tiers["large"].chat_format)
    request = Request(kind="embedding", model="large", prompts=tuple("abcdefgh"))
    context = msgspec.structs.replace(bed.call(), request=request, tier=tier)
    _, embeddings = await bed.service.embed(context)
    assert embeddings.vectors == ((0.5,),) * 8
    assert sorted(str(each.prompt) for each in bed.tritons["large"].requests) == list("abcdefgh")
    bed.tritons["large"].script = (Hung,)
    task = asyncio.ensure_future(bed.service.embed(context))
    await bed.tritons["large"].hangs.wait()
    await settle()
    assert bed.tritons["large"].open == 2
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert bed.is_free
