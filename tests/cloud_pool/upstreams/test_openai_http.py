"""A gateway before servers with OpenAI's HTTP API: their dialects, their refusals and their bad days."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from causeway_server.cloud_pool.config import Flags, load_config
from causeway_server.cloud_pool.dispatch.config import LoadBalancingConfig, RetryBudgetConfig
from causeway_server.cloud_pool.upstreams.config import Feature, UpstreamConfig
from causeway_server.cloud_pool.upstreams.inference import Delta, InferenceRequest
from causeway_server.cloud_pool.upstreams.openai_http import OpenAIUpstream
from causeway_server.cloud_pool.upstreams.triton.messages import SamplingParameters
from causeway_server.router.errors import (
    CausewayError,
    CloudUnreachable,
    ConfigError,
    DeadlineExceeded,
    UnsupportedFeature,
)
from causeway_server.router.serving.upstream.server import FixedToken
from causeway_server.router.types import Message, Request
from tests.dialects import ERRORS, HI, REASON, REFUSALS, STREAMS, TOOLS, UNREADABLE_STREAMS, WHOLES, read_of
from tests.edge_node.raw_upstream import RawUpstream, delta, document, events, reply, whole
from tests.edge_node.scripted import CLOUD_WORDS, ScriptedCloud
from tests.own_task import in_own_task
from tests.waiting import until

from .http_gateway import Gateway, http_tier, serving

CLOUD = "".join(CLOUD_WORDS)


@pytest.fixture
async def raw() -> AsyncIterator[RawUpstream]:
    upstream = await RawUpstream().start()
    yield upstream
    await upstream.stop()


@pytest.fixture
async def cloud() -> AsyncIterator[ScriptedCloud]:
    upstream = await ScriptedCloud().start()
    yield upstream
    await upstream.stop()


@pytest.fixture
async def before_raw(raw: RawUpstream, tmp_path: Path) -> AsyncIterator[Gateway]:
    async with in_own_task(serving(tmp_path, http_tier(raw.url))) as gateway:
        yield gateway


@pytest.fixture
async def gateway(cloud: ScriptedCloud, tmp_path: Path) -> AsyncIterator[Gateway]:
    async with in_own_task(serving(tmp_path, http_tier(cloud.url))) as gateway:
        yield gateway


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_an_answer_comes_with_its_usage(gateway: Gateway, cloud: ScriptedCloud, stream: bool) -> None:
    """The upstream's own model is named, and it is asked for a stream with its usage whatever the client wants."""
    more: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
    answer = await gateway.ask(stream=stream, temperature=0.5, seed=3, **more)
    assert (answer.status, answer.text) == (200, CLOUD)
    assert answer.headers["x-causeway-tier"] == "large"
    usage = answer.events[-1]["usage"] if stream else answer.json["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (7, 3)
    (sent,) = cloud.bodies
    assert (sent["model"], sent["stream"], sent["temperature"], sent["seed"]) == ("m", True, 0.5, 3)
    assert sent["messages"] == [{"role": "user", "content": "hello there"}]
    assert "x-request-id" not in cloud.request_headers[0]
    await until(lambda: bool(gateway.audit))
    assert (gateway.audit[0]["prompt_tokens"], gateway.audit[0]["completion_tokens"]) == (7, 3)


async def test_each_choice_is_a_request_with_a_seed_of_its_own(gateway: Gateway, cloud: ScriptedCloud) -> None:
    answer = await gateway.ask(n=3, seed=5)
    assert [choice["message"]["content"] for choice in answer.json["choices"]] == [CLOUD] * 3
    assert sorted(body["seed"] for body in cloud.bodies) == [5, 6, 7]  # type: ignore[type-var]
    assert all(body.get("n", 1) == 1 for body in cloud.bodies)
    assert answer.json["usage"]["prompt_tokens"] == 7
    assert answer.json["usage"]["completion_tokens"] == 9


async def test_a_limit_beyond_the_context_is_the_context(cloud: ScriptedCloud, tmp_path: Path) -> None:
    """vLLM refuses a larger one. Without a known context the client's own is sent."""
    for number, (context, sent) in enumerate([(512, 512), (0, 100_000)]):
        async with serving(tmp_path, http_tier(cloud.url, context_tokens=context)) as gateway:
            assert (await gateway.ask(max_tokens=100_000)).status == 200
        assert cloud.bodies[number]["max_tokens"] == sent


async def test_completions_and_embeddings(gateway: Gateway, cloud: ScriptedCloud) -> None:
    embedded = await gateway.post("/embeddings", {"model": "large", "input": ["a", "b"]})
    assert embedded.status == 200, embedded.body
    assert [one["index"] for one in embedded.json["data"]] == [0, 1]
    assert sorted(str(body["input"]) for body in cloud.bodies) == ["a", "b"]  # they run at the same time


async def test_cached_tokens_and_thoughts_of_the_upstream_are_reported(before_raw: Gateway, raw: RawUpstream) -> None:
    usage = {
        "prompt_tokens": 100,
        "completion_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 64},
        "completion_tokens_details": {"reasoning_tokens": 4},
    }
    raw.replies = [events(delta(reasoning_content="hm"), *HI, {"choices": [], "usage": usage})]
    found = (await before_raw.ask()).json["usage"]
    assert (found["prompt_tokens"], found["completion_tokens"]) == (100, 9)
    assert found["prompt_tokens_details"]["cached_tokens"] == 64
    assert found["completion_tokens_details"]["reasoning_tokens"] == 4


async def test_usage_that_is_missing_is_counted_and_estimated_for_the_books(
    before_raw: Gateway, raw: RawUpstream
) -> None:
    raw.replies = [events(*HI)]
    answer = await before_raw.ask()
    assert answer.json["usage"]["completion_tokens"] == 2
    await until(lambda: bool(before_raw.audit))
    record = before_raw.audit[0]
    assert record["completion_tokens"] == 2
    assert record["prompt_tokens"]
    assert record["estimated"] is True


@pytest.mark.slow
@pytest.mark.parametrize("name", STREAMS)
async def test_a_stream_is_read_as_it_was_meant(before_raw: Gateway, raw: RawUpstream, name: str) -> None:
    upstream, expected = STREAMS[name]
    raw.replies = [upstream]
    answer = await before_raw.ask(stream=True, tools=TOOLS)
    assert answer.status == 200, answer.body
    assert read_of(answer, expected.note) == expected
    assert len(raw.bodies) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLES)
async def test_a_whole_answer_is_read_as_it_was_meant(before_raw: Gateway, raw: RawUpstream, name: str) -> None:
    upstream, expected = WHOLES[name]
    raw.replies = [upstream]
    answer = await before_raw.ask(tools=TOOLS)
    assert answer.status == 200, answer.body
    assert read_of(answer, expected.note) == expected


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("status", REFUSALS)
async def test_a_refusal_has_its_status_and_runs_once(
    before_raw: Gateway, raw: RawUpstream, status: str, error: str
) -> None:
    expected_status, code, has_reason = REFUSALS[status]
    raw.replies = [document(ERRORS[error], status=status)]
    answer = await before_raw.ask()
    assert (answer.status, answer.code) == (expected_status, code)
    assert (REASON in answer.message) is has_reason
    assert "the prompt" not in answer.message
    assert len(raw.bodies) == 1


@pytest.mark.parametrize("name", UNREADABLE_STREAMS)
async def test_an_answer_that_cannot_be_read_is_an_error(before_raw: Gateway, raw: RawUpstream, name: str) -> None:
    raw.replies = [UNREADABLE_STREAMS[name], events(*HI)]
    answer = await before_raw.ask()
    assert (answer.status, answer.code) == (502, "cloud_unreadable")
    assert (await before_raw.ask()).text == "hi"


async def test_a_redirect_is_not_followed(before_raw: Gateway, raw: RawUpstream) -> None:
    raw.replies = [reply(b"", status="307 Temporary Redirect", headers=("Location: http://127.0.0.1:1/v1",))]
    answer = await before_raw.ask()
    assert (answer.status, answer.code) == (502, "cloud_failed")


async def test_an_error_inside_a_stream_ends_the_answer(before_raw: Gateway, raw: RawUpstream) -> None:
    """The text before it has reached the client; the choice has no finish reason."""
    raw.replies = [events(HI[0], {"error": {"message": "out of memory"}})]
    answer = await before_raw.ask(stream=True)
    assert [choice["delta"].get("content") for event in answer.events for choice in event.get("choices", [])][-1] == "h"
    assert answer.events[-1]["error"]["code"] == "cloud_failed"
    assert answer.finish_reasons == []


async def test_ids_and_the_models_name_may_change_within_a_stream(before_raw: Gateway, raw: RawUpstream) -> None:
    raw.replies = [events(*({**event, "id": f"x{n}", "model": f"m{n}"} for n, event in enumerate(HI)))]
    answer = await before_raw.ask(stream=True)
    assert answer.text == "hi"
    assert len({event["id"] for event in answer.events}) == 1
    assert {event["model"] for event in answer.events} == {"large"}


@pytest.mark.parametrize("form", ["seconds", "date"])
async def test_retry_after_is_passed_on_and_respected(gateway: Gateway, cloud: ScriptedCloud, form: str) -> None:
    """Until then the server is not asked again."""
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    cloud.status, cloud.headers = 429, {"Retry-After": "30" if form == "seconds" else later}
    for _ in range(2):
        answer = await gateway.ask()
        assert (answer.status, answer.code) == (429, "cloud_saturated")
        assert 28 <= int(answer.headers["Retry-After"]) <= 30
    assert len(cloud.bodies) == 1


async def test_another_server_is_asked_before_the_first_token(
    cloud: ScriptedCloud, raw: RawUpstream, tmp_path: Path
) -> None:
    raw.replies = [document({"error": {"message": "full"}}, status="503 Service Unavailable")]
    async with serving(tmp_path, http_tier(cloud.url, raw.url)) as gateway:
        for _ in range(64):  # the choice of the first server is random
            assert (await gateway.ask()).text == CLOUD
            if raw.bodies:
                break
    assert raw.bodies


async def test_a_server_that_is_gone_is_ejected_and_comes_back(tmp_path: Path) -> None:
    """New requests go to the other server; after a probe the first one answers again."""
    first, second = await ScriptedCloud().start(), await ScriptedCloud().start()
    port = first.port
    async with serving(tmp_path, http_tier(first.url, second.url)) as gateway:
        await first.stop()
        for _ in range(8):
            assert (await gateway.ask()).text == CLOUD
        pool = gateway.app.runtime.pools.by_tier["large"]
        assert pool.healthy == 1
        again = await ScriptedCloud().start(port)
        await until(lambda: pool.healthy == 2)
        await again.stop()
    await second.stop()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_client_that_leaves_ends_the_upstreams_work(
    gateway: Gateway, cloud: ScriptedCloud, stream: bool
) -> None:
    cloud.gate = asyncio.Event()
    asking = asyncio.create_task(gateway.ask(stream=stream))
    await cloud.entered.wait()
    assert cloud.running == 1
    asking.cancel()
    await until(lambda: cloud.running == 0)


async def test_a_stall_before_the_first_token_ends_at_the_deadline(gateway: Gateway, cloud: ScriptedCloud) -> None:
    cloud.fault = "stall"
    answer = await gateway.ask(headers={"x-causeway-deadline-ms": "300"})
    assert (answer.status, answer.code) == (504, "deadline_exceeded")
    await until(lambda: cloud.running == 0 or not gateway.app.runtime.pools.by_tier["large"].endpoints)


async def test_a_stall_between_tokens_ends_the_answer(cloud: ScriptedCloud, tmp_path: Path) -> None:
    """`token_timeout_s` bounds it, long before the deadline."""
    cloud.fault = "drip"
    upstream = UpstreamConfig(kind="openai", urls=(cloud.url,), token_timeout_s=0.05, verify_features=False)
    async with serving(tmp_path, http_tier(upstream=upstream)) as gateway:
        answer = await gateway.ask(stream=True)
        assert CLOUD.startswith(answer.text)
        assert answer.text not in ("", CLOUD)
        assert answer.events[-1]["error"]["code"] == "stream_broken"


async def test_a_stream_that_breaks_is_an_error_event(gateway: Gateway, cloud: ScriptedCloud) -> None:
    cloud.fault = "die"
    answer = await gateway.ask(stream=True)
    assert answer.events[-1]["error"]["code"] == "stream_broken"
    assert answer.finish_reasons == []


async def test_the_token_is_read_again_when_its_file_changes(cloud: ScriptedCloud, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("first\n")
    upstream = UpstreamConfig(kind="openai", urls=(cloud.url,), key_file=str(key), verify_features=False)
    async with serving(tmp_path, http_tier(upstream=upstream)) as gateway:
        await gateway.ask()
        key.write_text("second-one\n")
        await gateway.ask()
        key.unlink()
        assert (await gateway.ask()).status == 200
    sent = [headers["authorization"] for headers in cloud.request_headers]
    assert sent == ["Bearer first", "Bearer second-one", "Bearer second-one"]


async def test_unknown_fields_of_request_and_answer_travel_with_what_they_belong_to(
    before_raw: Gateway, raw: RawUpstream
) -> None:
    raw.replies = [document(whole(reasoning_details=[{"type": "x"}]))]
    mark = {"cache_control": {"type": "ephemeral"}}
    answer = await before_raw.ask(messages=[{"role": "user", "content": [{"type": "text", "text": "hi", **mark}]}])
    assert answer.json["choices"][0]["message"]["reasoning_details"] == [{"type": "x"}]
    (sent,) = raw.bodies
    assert json.dumps(mark)[1:-1] in json.dumps(sent["messages"])


# --- features ---------------------------------------------------------------------------------------------------------


def refusing(feature: str) -> bytes:
    return document({"error": {"message": f"{feature} need a parser."}}, status="400 Bad Request")


async def test_a_feature_that_the_server_refuses_is_found_at_start(raw: RawUpstream, tmp_path: Path) -> None:
    """The key is named, and what to do; the features that are listed are not tried."""
    raw.replies = [refusing("tools")]
    upstream = UpstreamConfig(kind="openai", urls=(raw.url,), without=("logprobs", "schemas"))
    with pytest.raises(ConfigError, match=r"tools need a parser.*--tool-call-parser.*add `tools`") as raised:
        async with serving(tmp_path, http_tier(upstream=upstream)):
            pass
    assert raised.value.where == "tiers[0].upstream.without"
    assert [("tools" in body, "logprobs" in body) for body in raw.bodies] == [(True, False)] * 2


async def test_logprobs_that_do_not_come_are_absent(raw: RawUpstream, tmp_path: Path) -> None:
    raw.replies = [events(*HI)]
    upstream = UpstreamConfig(kind="openai", urls=(raw.url,), without=("tools", "schemas"))
    with pytest.raises(ConfigError, match="has no logprobs"):
        async with serving(tmp_path, http_tier(upstream=upstream)):
            pass


@pytest.mark.parametrize(
    "reply_bytes", [b"", document({}, status="503 Service Unavailable"), document({}, status="401 Unauthorized")]
)
async def test_a_server_that_gives_no_answer_does_not_keep_the_gateway_from_starting(
    raw: RawUpstream, tmp_path: Path, reply_bytes: bytes
) -> None:
    raw.replies = [reply_bytes]
    async with serving(tmp_path, http_tier(upstream=UpstreamConfig(kind="openai", urls=(raw.url,)))) as gateway:
        raw.replies = [events(*HI)]
        assert gateway.app.url


@pytest.mark.parametrize(
    ("feature", "fields", "param"),
    [
        ("tools", {"tools": TOOLS}, "tools"),
        ("logprobs", {"logprobs": True}, "logprobs"),
        ("schemas", {"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
async def test_a_request_for_an_absent_feature_is_refused_by_name(
    raw: RawUpstream, tmp_path: Path, feature: Feature, fields: dict[str, Any], param: str
) -> None:
    upstream = UpstreamConfig(kind="openai", urls=(raw.url,), without=(feature,), verify_features=False)
    async with serving(tmp_path, http_tier(upstream=upstream)) as gateway:
        answer = await gateway.ask(**fields)
    assert (answer.status, answer.code) == (400, "unsupported_feature")
    assert answer.json["error"]["param"] == param
    assert not raw.bodies


# --- a server that hangs or restarts ----------------------------------------------------------------------------------


async def test_calls_that_wait_for_a_hung_server_are_answered_by_another(tmp_path: Path) -> None:
    """Long before their deadline; without another server they are told that it hangs."""
    hung, well = await ScriptedCloud().start(), await ScriptedCloud().start()
    hung.fault = "stall"
    quick = LoadBalancingConfig(silent_before_probe_s=0.05, probe_timeout_s=0.5, hung_after_s=1.0)
    tier = http_tier(hung.url, well.url, retry_budget=RetryBudgetConfig(share=1.0))
    async with serving(tmp_path, tier, load_balancing=quick) as gateway:
        answers = await asyncio.gather(*(gateway.ask() for _ in range(8)))
        assert {(answer.status, answer.text) for answer in answers} == {(200, CLOUD)}
    assert hung.bodies
    await until(lambda: hung.running == 0)
    async with serving(tmp_path, http_tier(hung.url), load_balancing=quick) as gateway:
        answer = await gateway.ask()
        assert (answer.status, answer.code) == (502, "stream_broken")
    for server in (hung, well):
        await server.stop()


async def test_a_server_that_restarts_under_100_streams_loses_none_that_had_not_begun(tmp_path: Path) -> None:
    """Each is answered once, by the other server; nothing runs on upstream, and all permits are free."""
    first, second = await ScriptedCloud().start(), await ScriptedCloud().start()
    first.gate = asyncio.Event()
    tier = http_tier(first.url, second.url, concurrency=64, retry_budget=RetryBudgetConfig(share=1.0))
    async with serving(tmp_path, tier, load_balancing=LoadBalancingConfig()) as gateway:
        asked = [asyncio.create_task(gateway.ask(stream=True)) for _ in range(100)]
        await until(lambda: len(first.bodies) + len(second.bodies) >= 100)
        waiting = first.running
        assert waiting
        await first.stop()
        answers = await asyncio.gather(*asked)
        assert {(answer.status, answer.text, answer.done) for answer in answers} == {(200, CLOUD, True)}
        assert len(second.bodies) >= 100 - len(first.bodies) + waiting
        assert second.running == 0
        await until(lambda: gateway.app.runtime.admissions["large"].scheduler.running == 0)
    await second.stop()


# --- keys that cannot work --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("urls", "where", "said"),
    [
        ("[]", "urls", "Name the servers"),
        ("['http://a/v1', 'http://b/v1', 'http://a/v1']", "urls[2]", "listed twice"),
        ("['http://a/v1', 'http://user:secret@b/v1']", "urls[1]", "`key_file`"),
        ("['http://a:99999/v1']", "urls[0]", "not a URL"),
        ("['http://a/v1/']", "urls[0]", "without a final `/`"),
        ("['ftp://a/v1']", "urls[0]", "not a URL"),
    ],
)
def test_urls_that_cannot_work_are_refused_by_their_place(tmp_path: Path, urls: str, where: str, said: str) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(f"tiers:\n  - name: a\n    upstream: {{kind: openai, urls: {urls}}}\n")
    with pytest.raises(ConfigError) as raised:
        load_config(path, Flags())
    assert f"tiers[0].upstream.{where}" in str(raised.value)
    assert said in str(raised.value)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("content", [None, "", "two tokens"], ids=["missing", "empty", "two"])
@pytest.mark.parametrize("key", ["key_file", "ca_file"])
def test_a_file_of_the_upstream_that_cannot_be_used_is_refused_by_its_key(
    tmp_path: Path, key: str, content: str | None
) -> None:
    file, path = tmp_path / "the-file", tmp_path / "gateway.yaml"
    if content is not None:
        file.write_text(content)
    path.write_text(f"tiers:\n  - name: a\n    upstream: {{kind: openai, urls: ['http://a/v1'], {key}: '{file}'}}\n")
    with pytest.raises(ConfigError, match=r"(cannot be read|holds no PEM)") as raised:
        load_config(path, Flags())
    assert f"tiers[0].upstream.{key}" in str(raised.value)


# --- one call ---------------------------------------------------------------------------------------------------------


CHAT = Request(kind="chat", model="large", messages=(Message("user", "hello there"),), stream=True)


@asynccontextmanager
async def client_of(url: str) -> AsyncIterator[OpenAIUpstream]:
    upstream = OpenAIUpstream(url, UpstreamConfig(kind="openai", urls=(url,)), FixedToken())
    try:
        yield upstream
    finally:
        await upstream.close()


def one_call(seconds: float = 60.0, traceparent: str = "") -> InferenceRequest:
    return InferenceRequest(
        model="m",
        prompt="",
        parameters=SamplingParameters(),
        openai=CHAT,
        deadline=time.monotonic() + seconds,
        request_id="r-1",
        traceparent=traceparent,
    )


async def collect(upstream: OpenAIUpstream, request: InferenceRequest) -> list[Delta]:
    async with aclosing(upstream.generate(request)) as deltas:
        return [delta async for delta in deltas]


async def test_a_call_carries_its_trace_and_an_expired_one_is_not_sent(cloud: ScriptedCloud) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with client_of(cloud.url) as upstream:
        assert await collect(upstream, one_call(traceparent=trace))
        await collect(upstream, one_call())
        with pytest.raises(DeadlineExceeded):
            await collect(upstream, one_call(seconds=-1.0))
    assert [headers.get("traceparent") for headers in cloud.request_headers] == [trace, None]


async def test_a_hung_server_fails_its_calls_before_and_after_their_first_token(raw: RawUpstream) -> None:
    """Each with the pool's first error, and its connection is closed; a call of another model goes on until it is
    cancelled.
    """
    raw.replies, raw.stalls = [events(HI[0], end=b""), b""], True
    hung = CloudUnreachable("The endpoint hangs.", phase="first_token")
    async with client_of(raw.url) as upstream:
        begun = upstream.generate(one_call())
        assert (await anext(begun)).new_tokens == 1
        between = asyncio.ensure_future(anext(begun))
        waiting = asyncio.create_task(collect(upstream, one_call()))
        other = asyncio.create_task(collect(upstream, msgspec.structs.replace(one_call(), model="other")))
        await until(lambda: raw.running == 3)
        upstream.fail_calls("m", hung, begun=False)
        with pytest.raises(CloudUnreachable, match="hangs"):
            await waiting
        await until(lambda: raw.running == 2)
        upstream.fail_calls("m", hung)
        upstream.fail_calls("m", DeadlineExceeded("A later error does not count."))
        with pytest.raises(CloudUnreachable, match="hangs"):
            await between
        await until(lambda: raw.running == 1)
        assert not other.done()
        other.cancel()
        await until(lambda: raw.running == 0)


@pytest.mark.parametrize(
    ("counted", "error"),
    [
        ([b"no JSON", b"no JSON", b"no JSON"], UnsupportedFeature),
        ([b'{"count": "many"}', b"\xff", b"{}"], UnsupportedFeature),
        ([b"{}", b'{"input_tokens": 9}'], None),
        ([b'{"count": 9}'], None),
    ],
)
async def test_a_count_that_cannot_be_read_is_none(
    raw: RawUpstream, counted: list[bytes], error: type[CausewayError] | None
) -> None:
    """The other ways of counting are tried; without a number there is none, and not 0."""
    raw.replies = [reply(body) for body in counted]
    async with client_of(raw.url) as upstream:
        counting = upstream.count("m", CHAT, b'{"model": "large", "messages": []}', time.monotonic() + 60.0)
        if error is None:
            assert await counting == 9
        else:
            with pytest.raises(error, match="does not count tokens"):
                await counting
    assert len(raw.bodies) == len(counted)
