"""Sessions at gateways: a tool's result goes to the tier that asked, at any gateway of one Redis."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis.asyncio

from causeway_server.cloud_pool.accounts.identity.config import IdentityConfig
from causeway_server.cloud_pool.core.request_context import AnswerHead, TierTurn, answer_head
from causeway_server.cloud_pool.degradation.config import DegradationConfig, TierSessionsConfig
from causeway_server.cloud_pool.degradation.tier_sessions import TierSessions
from causeway_server.cloud_pool.redis.config import RedisAddress
from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.router.session_tags import session_tag
from causeway_server.router.types import Message, Request, RoutingHints
from tests.bed.agents import Agent, AgentCloud, Kind, Scripts
from tests.cloud_pool.redis.declared_keys import declared
from tests.cloud_pool.upstreams.http_gateway import Gateway, http_tier, serving
from tests.redis_server import RedisServer, unreachable_redis
from tests.redis_server import redis_server as redis_server  # a fixture
from tests.waiting import until

CHAIN = ("large", "medium")
HEAD = answer_head("medium", "large=broken")


class Bed:
    """Gateways with the tiers large and medium, each with a server of its own."""

    def __init__(self, gateways: list[Gateway], clouds: dict[str, AgentCloud], scripts: Scripts) -> None:
        self.gateways = gateways
        self.clouds = clouds
        self.scripts = scripts

    async def turn(
        self, one: Agent, words: str = "tools=0", *, at: int = 0, model: str = "large"
    ) -> tuple[str, str, str]:
        """One turn; returns the tier that answered, or the error's code and message, and the session's header."""
        one.say(words)
        headers: dict[str, str] = {}
        path, body = one.request(headers, stream=False)
        answer = await self.gateways[at].post(path.removeprefix("/v1"), {**body, "model": model}, headers)
        if answer.status != 200:
            one.history.pop()
            error = answer.json["error"]
            return error.get("code") or error["type"], error["message"], ""
        one.take(answer.body, stream=False)
        return answer.headers["x-causeway-tier"], "", answer.headers.get("x-causeway-session", "")


@asynccontextmanager
async def bed(
    folder: Path,
    mode: str = "require",
    *,
    gateways: int = 1,
    url: RedisAddress = "",
    pin: str = "tool_loop",
    jobs: JobsConfig | None = None,
) -> AsyncIterator[Bed]:
    scripts = Scripts(1, faults=False)
    clouds = {name: AgentCloud(scripts) for name in CHAIN}
    sessions = TierSessionsConfig(mode=mode, pin=pin)  # type: ignore[arg-type]
    degradation = DegradationConfig(tiers=CHAIN, sessions=sessions, warm_up_after_idle_s=0.0)
    async with AsyncExitStack() as stack:
        for cloud in clouds.values():
            await cloud.start()
            stack.push_async_callback(cloud.stop)
        tiers = [
            http_tier(cloud.url, name=name, model=f"m-{name}", max_attempts=1, region="eu")
            for name, cloud in clouds.items()
        ]
        made = []
        for number in range(gateways):
            place = folder / str(number)
            place.mkdir()
            sections: dict[str, Any] = {
                "redis": url,
                "identity": IdentityConfig(region="eu"),
                "jobs": jobs or JobsConfig(),
            }
            gateway = serving(place, *tiers, degradation=degradation, **sections)
            made.append(await stack.enter_async_context(gateway))
        yield Bed(made, clouds, scripts)


def agent(kind: Kind = "history") -> Agent:
    return Agent(kind, 0, random.Random(0))


@pytest.mark.parametrize("kind", ["history", "named", "messages"])
async def test_a_result_goes_to_the_tier_that_asked_after_a_fallback(tmp_path: Path, kind: Kind) -> None:
    """And the user's next words to the tier that the client names."""
    async with bed(tmp_path) as made:
        one = agent(kind)
        made.clouds["large"].status = 503
        assert await made.turn(one, "tools=2") == ("medium", "", "new")
        made.clouds["large"].status = 200
        for _ in range(2):
            assert await made.turn(one) == ("medium", "", "stayed; reason=session")
        one.call_id = ""
        tier, _, header = await made.turn(one, "tools=0")
        assert (tier, header) == ("large", "switched; from=medium; reason=requested")
        assert made.scripts.foreign == []
        await until(lambda: made.gateways[0].audit)  # written after the answer
        assert next(record["session"] for record in made.gateways[0].audit) == "new"


async def test_require_names_the_tier_that_is_gone(tmp_path: Path) -> None:
    async with bed(tmp_path) as made:
        one = agent()
        assert (await made.turn(one, "tools=1"))[0] == "large"
        made.clouds["large"].status = 500
        code, message, _ = await made.turn(one)
        assert code == "session_target_unavailable"
        assert "The session stays at `large` (`degradation.sessions.mode: require`)" in message
        code, message, _ = await made.turn(one, model="medium")
        assert code == "session_target_unavailable"
        assert "Name `large`" in message
        assert made.scripts.foreign == []


async def test_prefer_goes_on_and_says_so(tmp_path: Path) -> None:
    async with bed(tmp_path, "prefer") as made:
        one = agent()
        assert (await made.turn(one, "tools=1"))[0] == "large"
        made.clouds["large"].status = 500
        tier, _, header = await made.turn(one)
        assert tier == "medium"
        assert header == "switched; from=large; reason=large=broken"
        assert made.scripts.foreign == ["m-large.1"]


async def test_prefer_goes_back_to_the_tier_that_is_named(tmp_path: Path) -> None:
    """Also where the tier of the session is the last one of the order."""
    async with bed(tmp_path, "prefer") as made:
        one = agent()
        made.clouds["large"].status = 503
        assert (await made.turn(one, "tools=1"))[0] == "medium"
        made.clouds["large"].status, made.clouds["medium"].status = 200, 500
        tier, _, header = await made.turn(one)
        assert (tier, header) == ("large", "switched; from=medium; reason=medium=broken")


async def test_with_sessions_off_nothing_is_pinned_or_said(tmp_path: Path) -> None:
    async with bed(tmp_path, "off") as made:
        one = agent()
        made.clouds["large"].status = 503
        assert await made.turn(one, "tools=1") == ("medium", "", "")
        made.clouds["large"].status = 200
        assert (await made.turn(one))[0] == "large"
        assert made.scripts.foreign == ["m-medium.1"]


async def test_the_regions_of_a_request_bind_the_rest_of_its_session(tmp_path: Path) -> None:
    """Another region's binding, later and without the first tag, leaves no tier."""
    async with bed(tmp_path) as made:
        body: dict[str, object] = {"model": "large", "messages": [{"role": "user", "content": "tools=0"}]}
        named = {"x-session-id": "bound"}
        (gateway,) = made.gateways
        first = await gateway.post("/chat/completions", body, {**named, "x-causeway-tags": "in-region:eu"})
        assert first.status == 200
        other = await gateway.post("/chat/completions", body, {**named, "x-causeway-tags": "in-region:us"})
        assert other.code == "outside_region"


async def test_a_request_that_is_refused_binds_its_session_too(tmp_path: Path) -> None:
    """It names a tier that the gateway does not have."""
    async with bed(tmp_path) as made:
        body: dict[str, object] = {"model": "nobody", "messages": [{"role": "user", "content": "tools=0"}]}
        (gateway,) = made.gateways
        assert (await gateway.post("/chat/completions", body, {"x-causeway-tags": "in-region:us"})).status == 404
        assert (await gateway.post("/chat/completions", {**body, "model": "large"}, {})).code == "outside_region"


@pytest.mark.redis
@pytest.mark.parametrize("kind", ["history", "named"])
async def test_another_gateway_continues_the_session(tmp_path: Path, redis_server: RedisServer, kind: Kind) -> None:
    async with bed(tmp_path, gateways=2, url=redis_server.url) as made:
        one = agent(kind)
        made.clouds["large"].status = 503
        assert (await made.turn(one, "tools=2"))[0] == "medium"
        made.clouds["large"].status = 200
        assert (await made.turn(one, at=1))[0] == "medium"
        assert (await made.turn(one, at=0))[0] == "medium"
        assert made.scripts.foreign == []


def chat(number: int, *tags: str) -> Request:
    messages = (Message("user", f"hello {number}"),)
    return Request(kind="chat", model="large", messages=messages, hints=RoutingHints(tags=tags))


async def test_an_answer_does_not_undo_a_binding_that_came_meanwhile() -> None:
    """One named session runs several agents at once."""
    sessions, name = TierSessions(TierSessionsConfig(mode="prefer"), {"large": CHAIN}, None), session_tag("one")
    free = await sessions.find(chat(1, name), "acme", "acme/kiosk", "large")
    assert free is not None
    await sessions.bind(chat(2, name, "in-region:eu"), "acme", "acme/kiosk")
    await sessions.keep(free, HEAD, chat(1, name))
    later = await sessions.find(chat(3, name), "acme", "acme/kiosk", "large")
    assert later is not None
    assert later.turn.session.regions == ("eu",)
    assert later.turn.session.target == "medium"


async def test_tenants_do_not_displace_each_others_bindings() -> None:
    config, name = TierSessionsConfig(mode="prefer", max_per_tenant=2), session_tag("one")
    sessions = TierSessions(config, {"large": CHAIN}, None)
    await sessions.bind(chat(1, name, "in-region:eu"), "acme", "acme/kiosk")
    for number in range(2, 5):
        turn = await sessions.find(chat(number), "other", "other/kiosk", "large")
        assert turn is not None
        await sessions.keep(turn, HEAD, chat(number))
    later = await sessions.find(chat(9, name), "acme", "acme/kiosk", "large")
    assert later is not None
    assert later.turn.session.regions == ("eu",)


@pytest.mark.redis
async def test_a_binding_holds_at_a_gateway_whose_clock_is_ahead(redis_server: RedisServer) -> None:
    redis_server.flush()
    config, name = TierSessionsConfig(mode="prefer"), session_tag("one")
    async with redis.asyncio.Redis.from_url(redis_server.url, retry=None) as client:
        ahead = TierSessions(config, {"large": CHAIN}, client, lambda: 2_000.0)
        other = TierSessions(config, {"large": CHAIN}, client, lambda: 1_000.0)
        turn = await ahead.find(chat(1, name), "acme", "acme/kiosk", "large")
        assert turn is not None
        await ahead.keep(turn, HEAD, chat(1, name))
        await other.bind(chat(2, name, "in-region:eu"), "acme", "acme/kiosk")
        later = await ahead.find(chat(3, name), "acme", "acme/kiosk", "large")
        assert later is not None
        assert later.turn.session.regions == ("eu",)


async def test_require_names_a_variant_of_a_tier_that_has_none_any_more(tmp_path: Path) -> None:
    async with bed(tmp_path, pin="conversation") as made:
        one = agent()
        assert (await made.turn(one))[0] == "large"
        sessions = made.gateways[0].app.server.admission.sessions
        assert sessions is not None
        (own,) = sessions._own.values()  # noqa: SLF001
        own |= {key: msgspec.structs.replace(state, model="m-trial") for key, state in own.items()}
        code, message, _ = await made.turn(one)
        assert code == "session_target_unavailable"
        assert "`large (m-trial)`" in message
        assert "no longer has the variant of the session" in message


async def test_a_session_is_kept_although_its_client_leaves_meanwhile(tmp_path: Path) -> None:
    """It has the whole answer, and may go on at another gateway."""
    started = asyncio.Event()

    class Slow(TierSessions):
        async def keep(self, turn: TierTurn, head: AnswerHead, request: Request) -> None:
            if not started.is_set():
                started.set()
                await asyncio.Event().wait()
            await super().keep(turn, head, request)

    async with bed(tmp_path, pin="conversation") as made:
        (gateway,) = made.gateways
        gateway.app.server.admission.sessions.__class__ = Slow
        body: dict[str, object] = {"model": "large", "messages": [{"role": "user", "content": "tools=0"}]}
        named = {"x-session-id": "one"}
        asking = asyncio.create_task(gateway.post("/chat/completions", {**body, "stream": True}, named))
        await started.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: gateway.app.listener.in_flight == 0)
        again = await gateway.post("/chat/completions", body, named)
        assert again.headers["x-causeway-session"].startswith("stayed")


@pytest.mark.redis
async def test_states_are_bounded_in_number_and_time(redis_server: RedisServer) -> None:
    """Each key in Redis has a time to live, and is in the list of keys."""
    redis_server.flush()
    config = TierSessionsConfig(mode="require", max_per_tenant=5, ttl_s=60.0)
    async with redis.asyncio.Redis.from_url(redis_server.url, retry=None) as client:
        sessions = TierSessions(config, {"large": CHAIN}, client)
        for number in range(9):
            turn = await sessions.find(chat(number), "acme", "acme/kiosk", "large")
            assert turn is not None
            await sessions.keep(turn, HEAD, chat(number))
        keys = [key.decode() async for key in client.scan_iter("causeway:sessions:*")]
        assert len(keys) == 5 + 1
        assert all([0 < await client.ttl(key) <= 60 for key in keys])
        assert all(len(declared(key)) == 1 for key in keys)


@pytest.mark.redis
async def test_without_redis_a_gateway_knows_its_own_sessions(redis_server: RedisServer) -> None:
    sessions = TierSessions(TierSessionsConfig(mode="require"), {"large": CHAIN}, unreachable_redis())
    turn = await sessions.find(chat(1), "acme", "acme/kiosk", "large")
    assert turn is not None
    await sessions.keep(turn, HEAD, chat(1))
    assert sessions.fault == "Sessions are known to each gateway alone, because their Redis is unavailable."
    after = Request(
        kind="chat",
        model="large",
        messages=(*chat(1).messages, Message("assistant", "hi"), Message("user", "and?")),
        hints=RoutingHints(),
    )
    known = await sessions.find(after, "acme", "acme/kiosk", "large")
    assert known is not None
    assert known.turn.session.target == "medium"
