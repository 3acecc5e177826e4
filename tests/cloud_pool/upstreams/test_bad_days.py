"""A gateway on each bad day of a server with OpenAI's HTTP API, on real sockets."""

from __future__ import annotations

from pathlib import Path

import pytest

from causeway_server.cloud_pool.degradation.config import DegradationConfig
from causeway_server.cloud_pool.dispatch.config import LoadBalancingConfig
from causeway_server.cloud_pool.upstreams.config import UpstreamConfig
from tests.bad_days import RETRY_AFTER_S, bad_days
from tests.edge_node.raw_upstream import RawUpstream
from tests.edge_node.scripted import CLOUD_WORDS, ScriptedCloud
from tests.waiting import until

from .http_gateway import http_tier, serving

DAYS = tuple(bad_days())
BEFORE = [name for name, day in bad_days().items() if day.code]
IN_TIME = {"x-causeway-deadline-ms": "400"}
CODES = {"a stall before tokens": "deadline_exceeded", "a stall between tokens": "stream_broken"}


@pytest.mark.parametrize("name", DAYS)
async def test_a_client_gets_what_there_is_and_one_end(tmp_path: Path, name: str) -> None:
    """The upstream was asked once, its connection ends, and the permit is free again."""
    day, upstream = bad_days()[name], await RawUpstream().start()
    upstream.replies, upstream.stalls = [day.sent], day.stalls
    config = UpstreamConfig(kind="openai", urls=(upstream.url,), token_timeout_s=0.2, verify_features=False)
    patient = LoadBalancingConfig(silent_before_probe_s=30.0)
    async with serving(tmp_path, http_tier(upstream=config), load_balancing=patient) as gateway:
        answer = await gateway.ask(stream=True, headers=IN_TIME if day.status == 504 else {})
        assert answer.status == day.status, answer.body
        if day.code:
            assert answer.code == CODES.get(name, day.code)
        else:
            assert answer.text == day.text
            error = answer.events[-1].get("error", {})
            assert error.get("code", "") == (CODES.get(name, day.late) if day.late else "")
            assert answer.finish_reasons == ([] if day.late else ["stop"])
            assert answer.done is not bool(day.late)
        if day.status == 429:
            assert RETRY_AFTER_S - 2 <= int(answer.headers["Retry-After"]) <= RETRY_AFTER_S
        assert len(upstream.bodies) == 1
        await until(lambda: gateway.app.runtime.admissions["large"].scheduler.running == 0 and upstream.running == 0)
    await upstream.stop()


@pytest.mark.parametrize("name", BEFORE)
async def test_the_next_tier_takes_over_before_the_first_token(tmp_path: Path, name: str) -> None:
    day, upstream, other = bad_days()[name], await RawUpstream().start(), await ScriptedCloud().start()
    upstream.replies, upstream.stalls = [day.sent], day.stalls
    tiers = (http_tier(upstream.url), http_tier(other.url, name="other"))
    order = DegradationConfig(tiers=("large", "other"), warm_up_after_idle_s=0.0)
    async with serving(tmp_path, *tiers, degradation=order) as gateway:
        answer = await gateway.ask(stream=True)
        assert (answer.status, answer.text) == (200, "".join(CLOUD_WORDS)), answer.body
        assert answer.headers["x-causeway-tier"] == "other"
        assert len(other.bodies) == 1
        await until(lambda: upstream.running == 0)
    await upstream.stop()
    await other.stop()
