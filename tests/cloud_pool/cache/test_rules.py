"""Which answers may be cached, under which key, and how a stream resumes after its leader died. Pure."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from causeway_server.cloud_pool.cache.config import CacheConfig
from causeway_server.cloud_pool.cache.shared_cache import CacheKeys, bypass_reason
from causeway_server.cloud_pool.cache.shared_generation import EmittedPrefix, ResumeFilter
from causeway_server.cloud_pool.tiers.config import TierConfig
from causeway_server.cloud_pool.tiers.tier import ChatFormat, Tier
from causeway_server.router.errors import ConfigError, StreamBroken
from causeway_server.router.types import Chunk, Request, RoutingHints, Sampling, Tool, ToolCallDelta, Usage

from .gateways import TIER, ask

ON = CacheConfig(enabled=True)
COOL = Tier(TierConfig(name="cool"), ChatFormat("template", temperature=0.0))
TOOL = (Tool("lamp"),)


@pytest.mark.parametrize(
    ("request_", "tier", "config", "why"),
    [
        (ask(), TIER, ON, ""),
        (ask(), TIER, CacheConfig(), "off"),
        (ask(temperature=None), TIER, ON, "sampled"),
        (ask(temperature=None), COOL, ON, ""),
        (ask(temperature=0.2), COOL, ON, "sampled"),
        (ask(n=2), TIER, ON, "sampled"),
        (ask(sampling=Sampling(0.7, seed=1)), TIER, ON, "sampled"),
        (ask(sampling=Sampling(0.7, seed=1)), TIER, CacheConfig(enabled=True, include_seeded=True), ""),
        (ask(temperature=0.7), TIER, CacheConfig(enabled=True, include_seeded=True), "sampled"),
        (ask(tools=TOOL), TIER, ON, "tools"),
        (ask(tools=TOOL), TIER, CacheConfig(enabled=True, include_tools=True), ""),
        (ask(echo=True), TIER, ON, "echo"),
        (ask(hints=RoutingHints(tags=("private",))), TIER, ON, "private"),
        (ask(hints=RoutingHints(tags=("no-store",))), TIER, CacheConfig(enabled=True, private_tags=()), "private"),
        (ask(hints=RoutingHints(tags=("staff",))), TIER, CacheConfig(enabled=True, private_tags=("staff",)), "private"),
        (ask(hints=RoutingHints(tags=("staff",))), TIER, ON, ""),
        (ask(kind="embedding"), TIER, ON, "embeddings"),
    ],
)
def test_bypass_reason(request_: Request, tier: Tier, config: CacheConfig, why: str) -> None:
    """Sampled answers, tools, echoed prompts and private requests bypass the cache unless configured otherwise."""
    assert bypass_reason(request_, tier, config) == why


def test_same_question_has_the_same_key() -> None:
    """However it is delivered, whichever alias or client it uses, and if it spells out a default."""
    keys = CacheKeys(ON)
    key = keys.key(ask(), TIER, "acme")
    for same in (
        ask(stream=True, include_usage=True),
        ask(model="big"),
        ask(user="eva", hints=RoutingHints(client="kiosk", deadline_ms=5)),
    ):
        assert keys.key(same, TIER, "acme") == key
    assert keys.key(ask(temperature=None), COOL, "acme") == keys.key(ask(), COOL, "acme")


def test_different_questions_have_different_keys() -> None:
    """By tenant, tier, template, version, secret or content."""
    base = (ON, b"", ask(), TIER, "acme")
    reworded = msgspec.structs.replace(TIER, chat_format=ChatFormat("another template"))
    found = {
        CacheKeys(config, secret).key(request, tier, tenant)
        for config, secret, request, tier, tenant in (
            base,
            (ON, b"", ask(), TIER, "acm"),
            (ON, b"", ask(), COOL, "acme"),
            (ON, b"", ask(), reworded, "acme"),
            (CacheConfig(enabled=True, version="2"), b"", ask(), TIER, "acme"),
            (ON, b"secret", ask(), TIER, "acme"),
            (ON, b"", ask("wake me"), TIER, "acme"),
            (ON, b"", ask(max_tokens=5), TIER, "acme"),
            (ON, b"", ask(logprobs=1), TIER, "acme"),
        )
    }
    assert len(found) == 9


def test_key_is_a_digest() -> None:
    for text in ("", "wake me up", "x" * 10_000):
        assert len(bytes.fromhex(CacheKeys(ON).key(ask(text), TIER, "acme"))) == 16


@pytest.mark.parametrize(
    ("config", "redis", "where"),
    [(CacheConfig(enabled=True), "", "cache.enabled"), (CacheConfig(lease_s=0.1), "redis://x", "cache.lease_s")],
)
def test_settings_that_cannot_work_are_refused(config: CacheConfig, redis: str, where: str) -> None:
    """A cache without a Redis, or whose leases expire before Redis can answer."""
    with pytest.raises(ConfigError, match=where):
        config.check(redis)
    CacheConfig().check("")


# --- an answer that starts over --------------------------------------------------------------------------------------


def cut(text: str, marks: set[int]) -> list[str]:
    at = [0, *sorted(mark for mark in marks if 0 < mark < len(text)), len(text)]
    return [text[a:b] for a, b in pairwise(at)]


@given(
    text=st.text(min_size=1, max_size=20),
    had=st.integers(0, 20),
    old=st.sets(st.integers(0, 20)),
    new=st.sets(st.integers(0, 20)),
)
def test_restarted_answer_is_sent_once(text: str, had: int, old: set[int], new: set[int]) -> None:
    """However both attempts were cut into chunks, with its end."""
    emitted = EmittedPrefix()
    got = ""
    for piece in cut(text[:had], old) if text[:had] else []:
        emitted.add(Chunk(text=piece))
        got += piece
    resume = emitted.resume() or ResumeFilter({})
    again = [Chunk(text=piece, tokens=1) for piece in cut(text, new)]
    again += [Chunk(finish_reason="stop"), Chunk(usage=Usage(1, 1))]
    rest = [piece for piece in map(resume.filter, again) if piece is not None]
    assert got + "".join(piece.text for piece in rest) == text
    assert [piece.finish_reason for piece in rest[-2:]] == ["stop", None]


@pytest.mark.parametrize(
    "piece",
    [Chunk(text="two"), Chunk(text="one", tool_calls=(ToolCallDelta(0, "{}"),)), Chunk(text="o", finish_reason="stop")],
)
def test_different_restart_breaks_the_stream(piece: Chunk) -> None:
    """Different text, or an end before what was already sent."""
    emitted = EmittedPrefix()
    emitted.add(Chunk(text="one word"))
    resume = emitted.resume()
    assert resume is not None
    with pytest.raises(StreamBroken):
        resume.filter(piece)


def test_ended_choice_ends_once() -> None:
    """The client gets the rest of the others and the usage; more of the ended choice breaks the stream."""
    emitted = EmittedPrefix()
    for had in (Chunk(text="one"), Chunk(finish_reason="stop"), Chunk(text="tw", index=1)):
        emitted.add(had)
    again = [Chunk(text="one"), Chunk(text="two", index=1), Chunk(finish_reason="stop")]
    rest = [Chunk(index=1, finish_reason="stop"), Chunk(usage=Usage(1, 1))]
    resume = emitted.resume()
    assert resume is not None
    assert [resume.filter(chunk) for chunk in (*again, *rest)] == [None, Chunk(text="o", index=1), None, *rest]
    with pytest.raises(StreamBroken):
        resume.filter(Chunk(text=" more"))
    emitted.add(rest[1])
    counted = emitted.resume()
    assert counted is not None
    assert counted.filter(rest[1]) is None


def test_only_plain_text_can_be_resumed() -> None:
    """A stream that sent nothing yet starts afresh."""
    emitted = EmittedPrefix()
    assert emitted.resume() is None
    emitted.add(Chunk(tool_calls=(ToolCallDelta(0, "{}"),)))
    with pytest.raises(StreamBroken):
        emitted.resume()
