"""A request on its way down the ladder: who answers, what it says about that, and what is left behind."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from cloud_pool.serving.request_context import CachedAnswer, answer_head
from cloud_pool.upstreams.triton.sampling_parameters import Guided
from router.errors import (
    CausewayError,
    CloudRejected,
    CloudUnreachable,
    ContextLengthExceeded,
    EngineUnavailable,
    InvalidRequest,
    PermissionDenied,
    QueueFull,
    StreamBroken,
)
from router.types import Chunk, Request, Sampling, Tool, Usage

from .scripted import CHAT, WORDS, Bed, Hung, Triton, end_of, text_of

ALL = "".join(WORDS)


def two(large: Triton | None = None, medium: Triton | None = None, **settings: object) -> Bed:
    return Bed({"large": large or Triton(), "medium": medium or Triton()}, **settings)  # type: ignore[arg-type]


async def test_the_tier_asked_for_answers() -> None:
    """Its name and `asked` are said before anything else; nobody else is asked; the answer may be kept."""
    bed = two()
    head, chunks = await bed.ask()
    assert head == answer_head("large", "requested")
    assert head.keep
    assert text_of(chunks) == ALL
    assert end_of(chunks).finish_reason == "stop"
    assert chunks[-1].usage == Usage(3, 6)
    assert not bed.tritons["medium"].asked
    assert bed.is_free


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
async def test_a_tier_that_fails_before_its_first_token_is_followed(
    error: CausewayError, why: str, stream: bool
) -> None:
    """The next one answers, says why, and is degraded: nobody keeps that answer for later."""
    bed = two(Triton(error))
    head, chunks = await bed.ask(bed.call(msgspec.structs.replace(CHAT, stream=stream)))
    assert head == answer_head("medium", why, degraded=True)
    assert not head.keep
    assert text_of(chunks) == ALL
    assert bed.is_free


async def test_a_full_tier_is_passed_over() -> None:
    """No place and no queue at the first one: the second answers."""
    bed = two(Triton("one ", Hung), permits=1)
    held = asyncio.ensure_future(bed.ask())
    await bed.tritons["large"].hangs.wait()
    head, _ = await bed.ask()
    assert (head.tier, dict(head.headers)["x-causeway-tier-reason"]) == ("medium", "large=saturated")
    held.cancel()
    await asyncio.gather(held, return_exceptions=True)
    assert bed.is_free


async def test_a_silent_tier_is_waited_for_as_long_as_its_objective_says() -> None:
    """Then the next one is asked, and the first one's work is cancelled and its place free."""
    bed = two(Triton(Hung), objective_s=0.05)
    head, chunks = await bed.ask()
    assert head == answer_head("medium", "large=slow", degraded=True)
    assert text_of(chunks) == ALL
    assert bed.is_free


async def test_the_last_tier_has_all_the_time() -> None:
    """A tier that nobody stands behind is cut by the request's deadline alone; with a short one, half is kept back."""
    bed = two(Triton(Hung), Triton(Hung), objective_s=30.0)
    asked = asyncio.ensure_future(bed.ask(bed.call(deadline_s=0.2)))
    await bed.tritons["medium"].hangs.wait()  # after half of the deadline, not after 30 s
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    assert bed.is_free


@pytest.mark.parametrize("error", [InvalidRequest("no"), CloudRejected("no")])
async def test_a_fault_of_the_request_is_its_answer(error: CausewayError) -> None:
    """No other tier would say anything else, so none is asked."""
    bed = two(Triton(error))
    with pytest.raises(type(error)):
        await bed.ask()
    assert not bed.tritons["medium"].asked
    assert bed.is_free


async def test_a_tier_that_is_not_for_this_request_is_passed_over() -> None:
    """A lower tier's shorter context says nothing about the request: the one above it, or its refusal, does."""
    bed = two(Triton(EngineUnavailable("gone")), Triton(ContextLengthExceeded("too long")))
    with pytest.raises(EngineUnavailable):
        await bed.ask()
    bed.tritons["large"].script = WORDS
    bed.pressure["large"].saturated = True  # medium is tried first
    head, _ = await bed.ask()
    assert head.tier == "large"
    assert bed.tritons["medium"].asked
    assert bed.is_free


async def test_after_the_first_token_nobody_takes_over() -> None:
    """The client has a part of this answer: it breaks, and says so."""
    bed = two(Triton("one ", StreamBroken("died", phase="stream")))
    with pytest.raises(StreamBroken):
        await bed.ask()
    assert not bed.tritons["medium"].asked
    assert bed.is_free


async def test_a_tier_that_keeps_failing_is_left_alone() -> None:
    """After five failures the breaker is open: the sixth request goes straight to the next tier."""
    bed = two(Triton(EngineUnavailable("gone")))
    for _ in range(8):
        head, _ = await bed.ask()
        assert dict(head.headers)["x-causeway-tier-reason"] == "large=broken"
    assert len(bed.tritons["large"].asked) == 5
    assert len(bed.tritons["medium"].asked) == 8


async def test_a_tier_without_endpoints_is_not_asked() -> None:
    """Nobody healthy is as good as broken."""
    bed = two()
    bed.health["large"].healthy = 0
    head, _ = await bed.ask()
    assert head.tier == "medium"
    assert not bed.tritons["large"].asked


async def test_all_refuse_with_the_soonest_time() -> None:
    """A refusal for want of room comes before one for a broken tier, with the least of all waits."""
    bed = two(Triton(EngineUnavailable("gone", retry_after_s=2.0)), Triton(QueueFull("full", retry_after_s=7.0)))
    with pytest.raises(QueueFull) as raised:
        await bed.ask()
    assert raised.value.retry_after_s == 2.0
    assert bed.is_free


async def test_a_critical_request_stays() -> None:
    """Its own tier or none, though the next one is well."""
    bed = two(Triton(EngineUnavailable("gone", retry_after_s=2.0)))
    with pytest.raises(EngineUnavailable):
        await bed.ask(bed.call(critical=True))
    assert not bed.tritons["medium"].asked
    assert bed.is_free


async def test_the_ladder_starts_where_the_caller_asks() -> None:
    """Nobody climbs up: a broken medium does not fall onto large."""
    bed = two(medium=Triton(EngineUnavailable("gone")))
    with pytest.raises(EngineUnavailable):
        await bed.ask(bed.call(msgspec.structs.replace(CHAT, model="medium")))
    assert not bed.tritons["large"].asked


async def test_several_prompts_fall_together() -> None:
    """A list of prompts is one answer of one tier."""
    bed = two(Triton(EngineUnavailable("gone")))
    request = Request(kind="completion", model="large", prompts=("a", "b"), n=1, echo=True)
    head, chunks = await bed.ask(bed.call(request))
    assert head.tier == "medium"
    assert ["".join(chunk.text for chunk in chunks if chunk.index == at) for at in (0, 1)] == ["a" + ALL, "b" + ALL]
    assert bed.is_free


# --- cancelled on any rung --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("large", "medium", "hangs"),
    [
        (Triton(Hung), Triton(), "large"),
        (Triton("one ", Hung), Triton(), "large"),
        (Triton(EngineUnavailable("gone")), Triton(Hung), "medium"),
        (Triton(EngineUnavailable("gone")), Triton("one ", Hung), "medium"),
    ],
)
@pytest.mark.parametrize("prompts", [1, 2])
async def test_who_leaves_frees_everything(large: Triton, medium: Triton, hangs: str, prompts: int) -> None:
    """Before the first token and after it, on the first rung and on the second, with one prompt and with two."""
    bed = two(Triton(*large.script), Triton(*medium.script))
    request = Request(kind="completion", model="large", prompts=("a",) * prompts)
    asked = asyncio.ensure_future(bed.ask(bed.call(request)))
    await bed.tritons[hangs].hangs.wait()
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    assert asked.cancelled()
    assert bed.is_free


async def test_who_leaves_says_nothing_about_the_tier() -> None:
    """However many leave while they wait, the breaker stays closed."""
    bed = two(Triton(Hung), permits=100)
    for _ in range(12):
        bed.tritons["large"].hangs = asyncio.Event()  # type: ignore[assignment]
        asked = asyncio.ensure_future(bed.ask())
        await bed.tritons["large"].hangs.wait()
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
    assert not bed.ladder.is_open("large")


# --- shortened answers ------------------------------------------------------------------------------------------------


def pressed(**settings: object) -> Bed:
    bed = two(**settings)
    for pressure in bed.pressure.values():
        pressure.saturated = True
    return bed


async def test_under_pressure_everywhere_answers_are_cut() -> None:
    """`length`, a token, degraded; the tier is asked for no more than that."""
    bed = pressed()
    head, chunks = await bed.ask()
    end = end_of(chunks)
    assert text_of(chunks) == "one two "
    assert end.finish_reason == "length"
    assert end.resume
    assert dict(head.headers)["x-causeway-tier-reason"].endswith("; truncated")
    assert dict(head.headers)["x-causeway-degraded"] == "true"
    assert not head.keep
    assert sum(len(triton.asked) for triton in bed.tritons.values()) == 1
    assert bed.is_free


async def test_the_rest_comes_as_if_it_had_never_been_cut() -> None:
    """Part by part while the pressure lasts, then all that is left: together they are the uncut answer."""
    bed = pressed()
    request, parts = CHAT, []
    for _ in range(2):
        _, chunks = await bed.ask(bed.call(request))
        parts.append(text_of(chunks))
        request = msgspec.structs.replace(CHAT, resume=end_of(chunks).resume, stream=True)
    for pressure in bed.pressure.values():
        pressure.saturated = False
    bed.now += 60.0
    _, chunks = await bed.ask(bed.call(request))
    assert parts == ["one two ", "three four "]
    assert text_of(chunks) == "five six "
    assert (end_of(chunks).finish_reason, end_of(chunks).resume) == ("stop", "")
    assert "tell me|one two three four " in {triton.asked[-1].prompt for triton in bed.tritons.values() if triton.asked}


async def test_the_rest_of_a_call_is_held_as_its_beginning_was() -> None:
    """The tier hears what the call answers, and how far it had come."""
    bed = pressed(answers="calls")
    _, chunks = await bed.ask()
    _, chunks = await bed.ask(bed.call(msgspec.structs.replace(CHAT, resume=end_of(chunks).resume)))
    told = [ask.parameters.guided for triton in bed.tritons.values() for ask in triton.asked]
    assert told == [Guided(copy_source="tell me"), Guided(copy_source="tell me", answer_prefix="one two ")]


async def test_the_rest_may_be_asked_for_under_another_name_of_the_tier() -> None:
    """An alias is the same question."""
    bed = pressed()
    _, chunks = await bed.ask()
    request = msgspec.structs.replace(CHAT, resume=end_of(chunks).resume)
    call = msgspec.structs.replace(bed.call(request), request=msgspec.structs.replace(request, model="alias"))
    _, chunks = await bed.ask(call)
    assert text_of(chunks) == "three four "


async def test_the_rest_is_as_long_as_was_asked_for() -> None:
    """max_tokens counts over all parts; its own end is `length` without a token."""
    bed = pressed()
    request = msgspec.structs.replace(CHAT, max_tokens=3)
    _, chunks = await bed.ask(bed.call(request))
    _, chunks = await bed.ask(bed.call(msgspec.structs.replace(request, resume=end_of(chunks).resume)))
    assert text_of(chunks) == "three "
    assert (end_of(chunks).finish_reason, end_of(chunks).resume) == ("length", "")


async def test_an_answer_that_ends_by_itself_is_whole() -> None:
    """Within the shortened length nothing was cut."""
    bed = pressed(truncate_to_tokens=50)
    _, chunks = await bed.ask()
    assert (text_of(chunks), end_of(chunks).finish_reason, end_of(chunks).resume) == (ALL, "stop", "")


async def test_who_asks_for_less_is_not_cut() -> None:
    """A limit of the caller's own that is no longer than ours: nothing is degraded."""
    bed = pressed()
    bed.pressure["large"].saturated = False
    head, chunks = await bed.ask(bed.call(msgspec.structs.replace(CHAT, max_tokens=2)))
    assert (text_of(chunks), end_of(chunks).resume) == ("one two ", "")
    assert "x-causeway-degraded" not in dict(head.headers)


@pytest.mark.parametrize(
    "fields", [{"stop": ("x",)}, {"sampling": Sampling(frequency_penalty=1.0)}, {"tools": (Tool("lamp"),)}]
)
async def test_what_could_not_go_on_is_not_cut(fields: dict[str, object]) -> None:
    """Such a request gets its whole answer, or none."""
    bed = pressed()
    _, chunks = await bed.ask(bed.call(msgspec.structs.replace(CHAT, **fields)))
    assert text_of(chunks) == ALL


async def test_critical_requests_are_not_cut() -> None:
    """Their tier's whole answer or none."""
    bed = pressed()
    head, chunks = await bed.ask(bed.call(critical=True))
    assert (head.tier, text_of(chunks)) == ("large", ALL)


async def test_a_token_is_refused_to_others_and_when_forged() -> None:
    """Another tenant: 403. Forged, or of another question: 400. Nothing runs for any of them."""
    bed = pressed()
    _, chunks = await bed.ask()
    token = end_of(chunks).resume
    asked = sum(len(triton.asked) for triton in bed.tritons.values())
    with pytest.raises(PermissionDenied):
        await bed.ask(bed.call(msgspec.structs.replace(CHAT, resume=token), tenant="other"))
    for request in (
        msgspec.structs.replace(CHAT, resume=token[:-9] + "AAAAAAAA="),
        msgspec.structs.replace(CHAT, resume=token, max_tokens=99),
    ):
        with pytest.raises(InvalidRequest):
            await bed.ask(bed.call(request))
    assert sum(len(triton.asked) for triton in bed.tritons.values()) == asked


# --- stale answers ----------------------------------------------------------------------------------------------------


async def old(request: Request, tenant: str) -> CachedAnswer | None:
    if tenant != "acme":
        return None
    return CachedAnswer(
        answer_head("large", "requested"), (Chunk("old", finish_reason="stop"), Chunk(usage=Usage(1, 1))), 12.0
    )


async def test_before_a_refusal_comes_an_old_answer() -> None:
    """It says that it is stale, of whom it is, and why there is none of today."""
    bed = two(Triton(EngineUnavailable("gone")), Triton(QueueFull("full")), stale=old)
    head, chunks = await bed.ask()
    assert text_of(chunks) == "old"
    assert (head.tier, head.stale_s, head.keep) == ("large", 12.0, False)
    assert dict(head.headers)["x-causeway-tier-reason"] == "large=broken; medium=saturated; stale"


async def test_who_stays_or_has_none_is_refused() -> None:
    """An old answer is not for the critical, and another tenant has none."""
    bed = two(Triton(EngineUnavailable("gone")), Triton(EngineUnavailable("gone")), stale=old)
    for call in (bed.call(critical=True), bed.call(tenant="other")):
        with pytest.raises(EngineUnavailable):
            await bed.ask(call)


async def test_a_faulty_request_gets_no_old_answer() -> None:
    """It is the request's fault: the error says so."""
    bed = two(Triton(InvalidRequest("no")), stale=old)
    with pytest.raises(InvalidRequest):
        await bed.ask()
