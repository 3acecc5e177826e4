"""A request on its way through the tiers: which tier answers, the stated reasons, and what is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import msgspec
import pytest

from causeway_server.cloud_pool.core.request_context import CachedAnswer, answer_head
from causeway_server.cloud_pool.upstreams.inference import Delta, InferenceRequest
from causeway_server.router.errors import (
    CausewayError,
    CloudRejected,
    CloudUnreachable,
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineUnavailable,
    InvalidRequest,
    QueueFull,
    StreamBroken,
)
from causeway_server.router.types import Chunk, Request, ResponseFormat, Tool, Usage

from .scripted import CHAT, WORDS, Bed, Hung, ScriptedTriton, end_of, text_of

ALL = "".join(WORDS)


def two(large: ScriptedTriton | None = None, medium: ScriptedTriton | None = None, **settings: object) -> Bed:
    return Bed({"large": large or ScriptedTriton(), "medium": medium or ScriptedTriton()}, **settings)  # type: ignore[arg-type]


async def test_the_requested_tier_answers() -> None:
    bed = two()
    head, chunks = await bed.send()
    assert head == answer_head("large", "requested")
    assert head.keep
    assert text_of(chunks) == ALL
    assert end_of(chunks).finish_reason == "stop"
    assert chunks[-1].usage == Usage(3, 6)
    assert not bed.tritons["medium"].requests
    assert bed.is_free


class Silent(ScriptedTriton):
    """Ends each answer before its first delta."""

    async def generate(
        self, request: InferenceRequest, key: bytes = b"", begun: object = None
    ) -> AsyncGenerator[Delta, None]:
        self.requests.append(request)
        deltas: tuple[Delta, ...] = ()
        for delta in deltas:
            yield delta


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "why"),
    [
        (EngineUnavailable("gone", retry_after_s=1.0), "large=broken"),
        (CloudUnreachable("gone", phase="connect"), "large=broken"),
        (StreamBroken("gone"), "large=broken"),
        (QueueFull("full", retry_after_s=1.0), "large=saturated"),
    ],
)
async def test_a_failure_before_the_first_token_falls_back(error: CausewayError, why: str, stream: bool) -> None:
    """That answer is degraded and not cached."""
    bed = two(ScriptedTriton(error))
    head, chunks = await bed.send(bed.call(msgspec.structs.replace(CHAT, stream=stream)))
    assert head == answer_head("medium", why, degraded=True)
    assert not head.keep
    assert text_of(chunks) == ALL
    assert bed.is_free


async def test_a_full_tier_is_skipped() -> None:
    bed = two(ScriptedTriton("one ", Hung), permits=1)
    held = asyncio.ensure_future(bed.send())
    await bed.tritons["large"].hangs.wait()
    head, _ = await bed.send()
    assert (head.model, dict(head.headers)["x-causeway-tier-reason"]) == ("medium", "large=saturated")
    held.cancel()
    await asyncio.gather(held, return_exceptions=True)
    assert bed.is_free


async def test_a_silent_tier_times_out_and_is_cancelled() -> None:
    bed = two(ScriptedTriton(Hung), objective_s=0.05)
    head, chunks = await bed.send()
    assert head == answer_head("medium", "large=slow", degraded=True)
    assert text_of(chunks) == ALL
    assert bed.is_free


async def test_a_tier_without_capacity_in_time_falls_back() -> None:
    """What waits for a permit is full rather than slow, and its place in the queue is free again."""
    bed = two(ScriptedTriton("one ", Hung), objective_s=0.05, permits=1, max_queued=4)
    held = asyncio.ensure_future(bed.send())
    await bed.tritons["large"].hangs.wait()
    head, chunks = await bed.send()
    assert (head.model, dict(head.headers)["x-causeway-tier-reason"]) == ("medium", "large=saturated")
    assert text_of(chunks) == ALL
    assert len(bed.tritons["large"].requests) == 1
    with pytest.raises(DeadlineExceeded):
        await bed.send(bed.call(deadline_s=0.1, critical=True))
    held.cancel()
    await asyncio.gather(held, return_exceptions=True)
    assert bed.is_free


@pytest.mark.parametrize("lower", [True, False], ids=["with a lower tier", "critical"])
async def test_a_model_that_ends_without_an_answer_is_broken(lower: bool) -> None:
    large = Silent()
    bed = two(large)
    if lower:
        head, chunks = await bed.send()
        assert head == answer_head("medium", "large=broken", degraded=True)
        assert text_of(chunks) == ALL
    else:
        with pytest.raises(StreamBroken, match="ended without an answer"):
            await bed.send(bed.call(critical=True))
        assert not bed.tritons["medium"].requests
    assert bed.is_free


async def test_the_last_tier_has_all_the_time() -> None:
    """With a short deadline, half is kept for the next tier."""
    bed = two(ScriptedTriton(Hung), ScriptedTriton(Hung), objective_s=30.0)
    task = asyncio.ensure_future(bed.send(bed.call(deadline_s=1.0)))
    await bed.tritons["medium"].hangs.wait()  # after half of the deadline, not after 30 s
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert bed.is_free


@pytest.mark.parametrize("error", [InvalidRequest("no"), CloudRejected("no")])
async def test_an_error_of_the_request_is_final(error: CausewayError) -> None:
    bed = two(ScriptedTriton(error))
    with pytest.raises(type(error)):
        await bed.send()
    assert not bed.tritons["medium"].requests
    assert bed.is_free


async def test_a_lower_tiers_invalid_request_is_not_the_requests_fault() -> None:
    bed = two(ScriptedTriton(EngineUnavailable("gone")), ScriptedTriton(ContextLengthExceeded("too long")))
    with pytest.raises(EngineUnavailable):
        await bed.send()
    bed.tritons["large"].script = WORDS
    bed.pressure["large"].is_saturated = True  # medium is tried first
    head, _ = await bed.send()
    assert head.model == "large"
    assert bed.tritons["medium"].requests
    assert bed.is_free


async def test_no_fallback_after_the_first_token() -> None:
    bed = two(ScriptedTriton("one ", StreamBroken("died", phase="stream")))
    with pytest.raises(StreamBroken):
        await bed.send()
    assert not bed.tritons["medium"].requests
    assert bed.is_free


async def test_a_failing_tier_opens_its_breaker() -> None:
    bed = two(ScriptedTriton(EngineUnavailable("gone")))
    for _ in range(8):
        head, _ = await bed.send()
        assert dict(head.headers)["x-causeway-tier-reason"] == "large=broken"
    assert len(bed.tritons["large"].requests) == 5
    assert len(bed.tritons["medium"].requests) == 8


async def test_a_tier_without_healthy_endpoints_is_skipped() -> None:
    bed = two()
    bed.health["large"].healthy = 0
    head, _ = await bed.send()
    assert head.model == "medium"
    assert not bed.tritons["large"].requests


async def test_the_final_error_has_the_soonest_retry_after() -> None:
    bed = two(
        ScriptedTriton(EngineUnavailable("gone", retry_after_s=2.0)),
        ScriptedTriton(QueueFull("full", retry_after_s=7.0)),
    )
    with pytest.raises(QueueFull) as raised:
        await bed.send()
    assert raised.value.retry_after_s == 2.0
    assert bed.is_free


async def test_a_critical_request_does_not_fall_back() -> None:
    bed = two(ScriptedTriton(EngineUnavailable("gone", retry_after_s=2.0)))
    with pytest.raises(EngineUnavailable):
        await bed.send(bed.call(critical=True))
    assert not bed.tritons["medium"].requests
    assert bed.is_free


async def test_fallback_starts_at_the_requested_tier() -> None:
    bed = two(medium=ScriptedTriton(EngineUnavailable("gone")))
    with pytest.raises(EngineUnavailable):
        await bed.send(bed.call(msgspec.structs.replace(CHAT, model="medium")))
    assert not bed.tritons["large"].requests


async def test_several_prompts_fall_back_together() -> None:
    bed = two(ScriptedTriton(EngineUnavailable("gone")))
    request = Request(kind="completion", model="large", prompts=("a", "b"), n=1, echo=True)
    head, chunks = await bed.send(bed.call(request))
    assert head.model == "medium"
    assert ["".join(chunk.text for chunk in chunks if chunk.index == at) for at in (0, 1)] == ["a" + ALL, "b" + ALL]
    assert bed.is_free


# --- cancelled on any tier --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("large", "medium", "hangs"),
    [
        (ScriptedTriton(Hung), ScriptedTriton(), "large"),
        (ScriptedTriton("one ", Hung), ScriptedTriton(), "large"),
        (ScriptedTriton(EngineUnavailable("gone")), ScriptedTriton(Hung), "medium"),
        (ScriptedTriton(EngineUnavailable("gone")), ScriptedTriton("one ", Hung), "medium"),
    ],
)
@pytest.mark.parametrize("prompts", [1, 2])
async def test_a_caller_that_leaves_frees_everything(
    large: ScriptedTriton, medium: ScriptedTriton, hangs: str, prompts: int
) -> None:
    bed = two(ScriptedTriton(*large.script), ScriptedTriton(*medium.script))
    request = Request(kind="completion", model="large", prompts=("a",) * prompts)
    task = asyncio.ensure_future(bed.send(bed.call(request)))
    await bed.tritons[hangs].hangs.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    assert bed.is_free


async def test_callers_that_leave_do_not_open_the_breaker() -> None:
    bed = two(ScriptedTriton(Hung), permits=100)
    for _ in range(12):
        bed.tritons["large"].hangs = asyncio.Event()  # type: ignore[assignment]
        task = asyncio.ensure_future(bed.send())
        await bed.tritons["large"].hangs.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert not bed.fallback.is_open("large")


# --- shortened answers ------------------------------------------------------------------------------------------------


def pressed(**settings: object) -> Bed:
    bed = Bed({"large": ScriptedTriton(), "medium": ScriptedTriton()}, **settings)  # type: ignore[arg-type]
    for pressure in bed.pressure.values():
        pressure.is_saturated = True
    return bed


async def test_under_stress_everywhere_answers_are_truncated() -> None:
    bed = pressed()
    head, chunks = await bed.send()
    end = end_of(chunks)
    assert text_of(chunks) == "one two "
    assert end.finish_reason == "length"
    assert dict(head.headers)["x-causeway-tier-reason"].endswith("; truncated")
    assert dict(head.headers)["x-causeway-degraded"] == "true"
    assert not head.keep
    assert sum(len(triton.requests) for triton in bed.tritons.values()) == 1
    assert bed.is_free


async def test_an_answer_shorter_than_the_limit_is_not_truncated() -> None:
    bed = pressed(truncated_answer_tokens=50)
    _, chunks = await bed.send()
    assert (text_of(chunks), end_of(chunks).finish_reason) == (ALL, "stop")


async def test_a_lower_max_tokens_is_not_a_truncation() -> None:
    bed = pressed()
    bed.pressure["large"].is_saturated = False
    head, chunks = await bed.send(bed.call(msgspec.structs.replace(CHAT, max_tokens=2)))
    assert text_of(chunks) == "one two "
    assert "x-causeway-degraded" not in dict(head.headers)


@pytest.mark.parametrize("fields", [{"tools": (Tool("lamp"),)}, {"response_format": ResponseFormat("json_object")}])
async def test_calls_and_json_are_not_truncated(fields: dict[str, object]) -> None:
    bed = pressed()
    _, chunks = await bed.send(bed.call(msgspec.structs.replace(CHAT, **fields)))
    assert text_of(chunks) == ALL


async def test_answers_have_their_length_without_the_key() -> None:
    bed = pressed(truncated_answer_tokens=0)
    _, chunks = await bed.send()
    assert text_of(chunks) == ALL


async def test_critical_requests_are_not_truncated() -> None:
    bed = pressed()
    head, chunks = await bed.send(bed.call(critical=True))
    assert (head.model, text_of(chunks)) == ("large", ALL)


# --- stale answers ----------------------------------------------------------------------------------------------------


async def old(request: Request, tenant: str) -> CachedAnswer | None:
    if tenant != "acme":
        return None
    return CachedAnswer(
        answer_head("large", "requested"), (Chunk("old", finish_reason="stop"), Chunk(usage=Usage(1, 1))), 12.0
    )


async def test_a_stale_answer_precedes_an_error() -> None:
    """Another question, and a critical one, get the error."""
    bed = two(ScriptedTriton(EngineUnavailable("gone")), ScriptedTriton(QueueFull("full")), stale=old)
    head, chunks = await bed.send()
    assert text_of(chunks) == "old"
    assert (head.model, head.stale_s, head.keep) == ("large", 12.0, False)
    assert dict(head.headers)["x-causeway-tier-reason"] == "large=broken; medium=saturated; stale"


async def test_no_stale_answer_for_critical_requests_or_other_tenants() -> None:
    bed = two(ScriptedTriton(EngineUnavailable("gone")), ScriptedTriton(EngineUnavailable("gone")), stale=old)
    for call in (bed.call(critical=True), bed.call(tenant="other")):
        with pytest.raises(EngineUnavailable):
            await bed.send(call)


async def test_an_invalid_request_gets_no_stale_answer() -> None:
    bed = two(ScriptedTriton(InvalidRequest("no")), stale=old)
    with pytest.raises(InvalidRequest):
        await bed.send()
