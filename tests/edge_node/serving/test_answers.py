"""What a client receives and what is recorded: cache, single-flight, stale answers, privacy, cost, deadlines."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import time
from collections.abc import Callable
from pathlib import Path

import aiohttp
import msgspec
import pytest

from causeway_server.edge_node.app import build
from causeway_server.edge_node.clock import Clock
from causeway_server.edge_node.config.schema import KeyConfig, ServerConfig
from causeway_server.router.bundle.settings import DecisionsConfig
from causeway_server.router.errors import ContextLengthExceeded
from causeway_server.router.types import DeviceSetup, Estimates, Usage
from tests.edge_node.storage.test_cache import every_byte
from tests.waiting import until

from ..device import POLICY, Device, config, hasty, running
from ..scripted import CLOUD_WORDS, EDGE_WORDS, Fault, ScriptedCloud, ScriptedEngine

EDGE, CLOUD = "".join(EDGE_WORDS), "".join(CLOUD_WORDS)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_an_answer_says_where_it_came_from(device: Device, stream: bool) -> None:
    """The headers and the record agree on route, target, reason, cache, policy and tokens."""
    answer = await device.ask(stream=stream, temperature=0, tags="cloud")
    assert answer.text == CLOUD
    headers = answer.headers
    assert headers["x-causeway-route"] == "cloud"
    assert headers["x-causeway-target"] == "large"
    assert headers["x-causeway-reason"] == "cloud-first"
    assert headers["x-causeway-cache"] == "miss"
    assert headers["x-causeway-degraded"] == "false"
    record = await device.record(answer)
    assert headers["x-causeway-policy"] == f"test@{record.decision.revision}"  # type: ignore[union-attr]
    outcome = record.outcome
    assert (outcome.status, outcome.http_status, outcome.route, outcome.target) == ("ok", 200, "cloud", "large")
    assert (outcome.reason, outcome.cache, outcome.finish_reason) == ("cloud-first", "miss", "stop")
    assert outcome.usage == Usage(prompt_tokens=7, completion_tokens=3)
    assert outcome.usd == pytest.approx(0.01)
    assert record.request.tags == ("cloud",)
    assert outcome.ttft_ms is not None
    assert 0 < outcome.ttft_ms <= outcome.total_ms
    assert [attempt.state for attempt in outcome.attempts] == ["done"]


@pytest.mark.parametrize("again", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("first", [False, True], ids=["whole", "stream"])
async def test_an_equal_request_is_a_hit(device: Device, first: bool, again: bool) -> None:
    """Complete or streamed: the second answer comes from the cache, with its own id and time."""
    miss = await device.ask(stream=first, temperature=0)
    hit = await device.ask(stream=again, temperature=0, stream_options={"include_usage": True} if again else None)
    assert hit.text == miss.text == EDGE
    assert (hit.headers["x-causeway-route"], hit.headers["x-causeway-cache"]) == ("cache", "hit")
    assert hit.headers["x-causeway-target"] == "small"
    assert len(device.engine.calls) == 1
    record = await device.record(hit)
    assert record.outcome.attempts == ()
    assert record.outcome.usage.completion_tokens == 3
    ids = [(answer.events[0] if stream else answer.json)["id"] for answer, stream in ((miss, first), (hit, again))]
    assert ids[0] != ids[1]
    if again:
        assert hit.done
        assert hit.finish_reasons == ["stop"]
        assert hit.events[-1]["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    "other",
    [
        {"max_tokens": 5},
        {"messages": [{"role": "user", "content": "hello "}]},
        {"messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]},
        {"stop": ["x"]},
        {"model": "small"},
        {"response_format": {"type": "json_object"}},
        {"logprobs": True},
        {"seed": 3},
    ],
    ids=lambda other: next(iter(other)),
)
async def test_a_different_request_is_never_a_hit(device: Device, other: dict[str, object]) -> None:
    await device.ask(temperature=0)
    answer = await device.ask(**{"temperature": 0, **other})  # type: ignore[arg-type]
    assert answer.headers["x-causeway-cache"] == "miss"


async def test_a_sampled_answer_is_not_cached(device: Device) -> None:
    for _ in range(2):
        answer = await device.ask()
        assert answer.headers["x-causeway-cache"] == "bypass"
    assert len(device.engine.calls) == 2


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_broken_or_degraded_answer_is_not_cached(device: Device, stream: bool) -> None:
    device.engine.fault = "die"
    await device.ask(stream=stream, temperature=0)
    device.engine.fault = "none"
    answer = await device.ask(stream=stream, temperature=0)
    assert answer.headers["x-causeway-cache"] == "miss"
    assert answer.text == EDGE


async def test_hits_survive_a_restart(tmp_path: Path) -> None:
    async with running(tmp_path) as device:
        await device.ask(temperature=0)
    async with running(tmp_path) as device:
        answer = await device.ask(temperature=0)
        assert answer.headers["x-causeway-cache"] == "hit"
        assert answer.text == EDGE
        assert device.engine.calls == []


async def test_an_expired_answer_is_served_when_every_target_fails(device: Device) -> None:
    """After its TTL an answer is generated again; if that fails, the expired one is served, marked stale."""
    for _ in range(2):
        fresh = await device.ask(temperature=0, tags="stale")
        assert fresh.headers["x-causeway-cache"] == "miss"
        await older_than(0.001)
    device.engine.fault, device.cloud.fault = "refuse", "refuse"
    stale = await device.ask(temperature=0, tags="stale")
    assert stale.status == 200
    assert stale.text == EDGE
    assert stale.headers["x-causeway-cache"] == "stale"
    assert stale.headers["x-causeway-degraded"] == "true"
    assert stale.headers["x-causeway-reason"] == "stale: all_attempts_failed"
    record = await device.record(stale)
    assert record.outcome.status == "ok"
    assert len(record.outcome.attempts) == 2


async def test_a_refused_request_gets_no_stale_answer(device: Device) -> None:
    """Neither for a constraint nor for a preference that excludes every target."""
    await device.ask(temperature=0, tags="stale")
    device.engine.fault = "refuse"
    answer = await device.ask(temperature=0, tags="stale", headers={"x-causeway-prefer": "only_on_device"})
    assert answer.status == 503


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_identical_requests_in_progress_share_one_generation(device: Device, stream: bool) -> None:
    """Each request has its own outcome and id."""
    device.engine.gate = asyncio.Event()
    requests = [asyncio.ensure_future(device.ask(stream=stream, temperature=0)) for _ in range(10)]
    await until(lambda: device.parts.shared_generations.subscribers == 10)
    device.engine.gate.set()
    answers = await asyncio.gather(*requests)
    assert {answer.text for answer in answers} == {EDGE}
    assert len(device.engine.calls) == 1
    statuses = [answer.headers["x-causeway-cache"] for answer in answers]
    assert sorted(statuses) == ["coalesced"] * 9 + ["miss"]
    assert len({answer.headers["x-causeway-decision"] for answer in answers}) == 10
    assert len(device.parts.decisions.memory) == 10
    device.assert_nothing_leaks()


async def test_a_follower_with_a_later_deadline_starts_its_own_generation(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the first request's deadline ends the shared generation."""
    device.engine.gate = asyncio.Event()
    hasty = asyncio.ensure_future(device.ask(temperature=0, headers={"x-causeway-deadline-ms": "30000"}))
    await until(lambda: device.engine.running == 1)
    patient = asyncio.ensure_future(device.ask(temperature=0))  # within 60 s
    await until(lambda: device.parts.shared_generations.subscribers == 2)
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "time", functools.partial(_later, loop.time, 31.0))
    assert (await hasty).status == 504
    await until(lambda: len(device.engine.calls) == 2)
    device.engine.gate.set()
    answer = await patient
    assert answer.text == EDGE
    assert answer.headers["x-causeway-cache"] == "miss"
    device.assert_nothing_leaks()


def _later(clock: Callable[[], float], seconds: float) -> float:
    return clock() + seconds


async def test_the_follower_is_answered_when_the_first_client_disconnects(device: Device) -> None:
    device.engine.gate = asyncio.Event()
    leader = asyncio.ensure_future(device.ask(temperature=0))
    await until(lambda: device.engine.running == 1)
    follower = asyncio.ensure_future(device.ask(temperature=0))
    await until(lambda: device.parts.shared_generations.subscribers == 2)
    leader.cancel()
    await until(lambda: len(device.parts.decisions.memory) == 1)
    assert device.newest().outcome.status == "cancelled"
    device.engine.gate.set()
    assert (await follower).text == EDGE
    assert len(device.engine.calls) == 1


async def test_private_answers_are_cached_per_client(tmp_path: Path) -> None:
    """Another client does not get them, and none is on disk."""
    keys = tuple(KeyConfig(name, hashlib.sha256(name.encode()).hexdigest()) for name in ("ann", "bob"))
    async with running(tmp_path, server=ServerConfig(port=0, keys=keys)) as device:
        seen = []
        for name in ("ann", "ann", "bob", "bob"):
            headers = {"Authorization": f"Bearer {name}"}
            answer = await device.ask("my secret is 1234", temperature=0, tags="private", headers=headers)
            seen.append(answer.headers["x-causeway-cache"])
        assert seen == ["miss", "hit", "miss", "hit"]
        assert device.cloud.bodies == []
    assert b"1234" not in every_byte(tmp_path)


@pytest.mark.parametrize("words", [{"tags": "private"}, {"headers": {"x-causeway-prefer": "only_on_device"}}])
async def test_content_bound_to_the_device_is_in_no_file_and_no_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, words: dict[str, object]
) -> None:
    """Bound by a constraint or by a preference, in success and in failure."""
    caplog.set_level("DEBUG")
    async with running(tmp_path) as device:
        for fault in ("none", "corrupt"):
            device.engine.fault = fault
            most = 10 if fault == "none" else 11
            await device.ask("my secret prompt is 1234", temperature=0, max_tokens=most, **words)  # type: ignore[arg-type]
        assert device.cloud.bodies == []
    kept = every_byte(tmp_path)
    for secret in (b"1234", b"secret prompt", EDGE.encode()):
        assert secret not in kept
        assert secret.decode() not in caplog.text


async def test_a_preference_narrows_the_policy_and_never_widens_it(device: Device) -> None:
    """only_cloud on a private request leaves no target: an error that says so, and no upstream request."""
    answer = await device.ask(tags="private", headers={"x-causeway-prefer": "only_cloud"})
    assert answer.status == 503
    assert answer.code == "no_route"
    assert "private-stays" in answer.message
    assert device.cloud.bodies == []
    assert device.engine.calls == []


IMAGE = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}


@pytest.mark.parametrize("model", ["auto", "small"])
async def test_content_that_no_target_can_take_is_the_clients_mistake(device: Device, model: str) -> None:
    answer = await device.ask(model=model, messages=[{"role": "user", "content": [IMAGE]}])
    assert (answer.status, answer.code) == (400, "unsupported_feature")
    assert "supports images" in answer.message
    assert "let the device read it (extra `images`, `fusion: late`)" in answer.message
    assert answer.json["error"]["param"] == "messages"
    assert (await device.record(answer)).outcome.status == "rejected"


async def test_content_that_another_target_could_take_is_503(tmp_path: Path) -> None:
    """A constraint keeps it from that target."""
    policy = POLICY.replace(
        "price: {input: 1000, output: 1000}\n    can: [chat,",
        "price: {input: 1000, output: 1000}\n    can: [chat, image,",
    )
    async with running(tmp_path, policy=policy) as device:
        answer = await device.ask(tags="private", messages=[{"role": "user", "content": [IMAGE]}])
        assert (answer.status, answer.code) == (503, "no_route")


async def test_a_prompt_too_long_for_every_target_is_400_with_all_numbers(tmp_path: Path) -> None:
    async with running(tmp_path) as device:
        device.engine.refusal = ContextLengthExceeded("the prompt has 9000 tokens, this model's context is 2048.")
        device.cloud.status = 400
        message = "the prompt has 9001 tokens, this model's context is 4096."
        device.cloud.error = {"message": message, "code": "context_length_exceeded"}
        answer = await device.ask()
        assert (answer.status, answer.code) == (400, "context_length_exceeded")
        for number in ("9000", "2048", "9001", "4096"):
            assert number in answer.message


async def test_a_prompt_too_long_for_the_device_is_400_on_a_device_without_a_cloud(tmp_path: Path) -> None:
    """The policy's cloud target can never take it here."""
    engine = ScriptedEngine()
    engine.refusal = ContextLengthExceeded("the prompt has 9000 tokens, this model's context is 2048.")
    app = build(config(tmp_path), make_engine=lambda _: engine, environ={})
    await app.start()
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{app.port}") as session:
            device = Device(app, engine, ScriptedCloud(), session)
            for tags in ("", "cloud"):
                answer = await device.ask(tags=tags)
                assert (answer.status, answer.code) == (400, "context_length_exceeded")
    finally:
        await app.close()


async def test_routing_hints_are_not_sent_upstream(device: Device) -> None:
    """The cloud gets the messages, its deadline, priority and the policy's name: no tags, preference or client."""
    await device.ask(
        tags="cloud",
        headers={
            "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "x-causeway-prefer": "prefer_cloud",
        },
        causeway={"tags": ["secret-project"]},
    )
    assert set(device.cloud.bodies[0]) == {"model", "messages"}
    sent = device.cloud.request_headers[0]
    assert sent["traceparent"].startswith("00-0af7651916cd43dd8448eb211c80319c-")
    assert {name for name in sent if name.startswith("x-causeway")} == {
        "x-causeway-deadline-ms",
        "x-causeway-policy",
        "x-causeway-priority",
    }
    assert "secret-project" not in str(sent)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_degraded_answer_of_the_cloud_is_reported_and_not_cached(device: Device, stream: bool) -> None:
    """The client gets the header, the record the tier and its reason."""
    device.cloud.headers = {
        "x-causeway-tier": "medium", "x-causeway-tier-reason": "large=saturated", "x-causeway-degraded": "true",
        "x-causeway-modalities": "image=timeout",
    }  # fmt: skip
    answer = await device.ask("the same", tags="cloud", temperature=0.0, stream=stream)
    assert (answer.status, answer.headers["x-causeway-degraded"]) == (200, "true")
    assert answer.headers["x-causeway-modalities"] == "image=timeout"
    record = await device.record(answer)
    assert record.outcome.degraded
    assert record.outcome.attempts[-1].detail == "answered by tier medium: large=saturated"
    device.cloud.headers = {}
    again = await device.ask("the same", tags="cloud", temperature=0.0, stream=stream)
    assert (again.headers["x-causeway-cache"], again.headers["x-causeway-degraded"]) == ("miss", "false")
    assert (await device.record(again)).outcome.attempts[-1].detail == ""


async def test_an_uncacheable_request_is_sent_with_no_store(device: Device) -> None:
    await device.ask("one", tags="cloud", temperature=0.7)
    await device.ask("two", tags="cloud", temperature=0.0)
    assert [sent.get("cache-control") for sent in device.cloud.request_headers] == ["no-store", None]


async def test_the_cloud_is_sent_the_time_left(device: Device) -> None:
    """Not a clock time, and never more than the client's deadline."""
    await device.ask(tags="cloud", headers={"x-causeway-deadline-ms": "300"})
    assert 0 < int(device.cloud.request_headers[0]["x-causeway-deadline-ms"]) <= 300


async def test_a_400_of_the_cloud_reaches_the_client_and_is_not_retried(device: Device) -> None:
    """With the cloud's message and param; the record contains neither."""
    device.cloud.status = 400
    device.cloud.error = {"message": "the secret is bad", "param": "messages", "code": "invalid_value"}
    answer = await device.ask(tags="cloud")
    assert answer.status == 400
    assert answer.message == "the secret is bad"
    assert device.engine.calls == []
    record = await device.record(answer)
    assert b"secret" not in msgspec.json.encode(record)


async def test_a_targets_error_message_is_not_recorded(device: Device) -> None:
    """An error in the stream may quote the prompt: the client gets it, the record does not."""
    device.cloud.error = {"message": "cannot tokenize: the secret prompt"}
    answer = await device.ask(stream=True, headers={"x-causeway-prefer": "only_cloud"})
    assert answer.status == 502
    assert "the secret prompt" in answer.message
    record = await device.record(answer)
    assert record.outcome.attempts[0].error == "cloud_failed"
    assert b"secret" not in msgspec.json.encode(record)


@pytest.mark.parametrize("status", [400, 402, 404, 413, 422, 451])
async def test_a_refusals_reason_is_not_recorded(device: Device, status: int) -> None:
    device.cloud.status, device.cloud.error = status, {"message": "cannot tokenize: the secret prompt"}
    answer = await device.ask(headers={"x-causeway-prefer": "only_cloud"})
    assert "the secret prompt" in answer.message
    assert b"secret" not in msgspec.json.encode(await device.record(answer))


async def test_a_prompt_too_long_for_one_target_is_tried_on_the_next(device: Device) -> None:
    device.cloud.status = 400
    device.cloud.error = {"message": "too long", "code": "context_length_exceeded"}
    answer = await device.ask(tags="cloud")
    assert answer.text == EDGE
    assert answer.headers["x-causeway-degraded"] == "false"


async def test_saturation_everywhere_is_a_429_with_the_clouds_retry_after(device: Device) -> None:
    device.cloud.status, device.cloud.headers = 429, {"Retry-After": "7"}
    answer = await device.ask(headers={"x-causeway-prefer": "only_cloud"})
    assert answer.status == 429
    assert answer.headers["Retry-After"] == "7"


async def test_a_full_queue_is_a_429_with_retry_after(device: Device) -> None:
    """Four running, four queued: the ninth is refused, the others are answered."""
    device.engine.gate = asyncio.Event()
    requests = [asyncio.ensure_future(device.ask(f"question {n}")) for n in range(8)]
    await until(lambda: (stats := device.parts.admission).running == 4 and stats.waiting == 4)
    refused = await device.ask("one more")
    assert refused.status == 429
    assert refused.code == "queue_full"
    assert int(refused.headers["Retry-After"]) >= 1
    assert (await device.record(refused)).outcome.status == "rejected"
    device.engine.gate.set()
    assert [answer.status for answer in await asyncio.gather(*requests)] == [200] * 8
    device.assert_nothing_leaks()


async def test_a_hit_does_not_wait_for_a_permit(device: Device) -> None:
    await device.ask("known", temperature=0)
    device.engine.gate = asyncio.Event()
    requests = [asyncio.ensure_future(device.ask(f"question {n}")) for n in range(8)]
    await until(lambda: device.parts.admission.waiting == 4)
    assert (await device.ask("known", temperature=0)).headers["x-causeway-cache"] == "hit"
    device.engine.gate.set()
    await asyncio.gather(*requests)


async def test_the_rate_limit_applies_to_hits_too(tmp_path: Path) -> None:
    policy = POLICY.replace("queue: 4}", "queue: 4, per_client_rps: 2}")
    async with running(tmp_path, policy=policy) as device:
        statuses = [(await device.ask(temperature=0)).status for _ in range(5)]
        assert statuses[:2] == [200, 200]
        assert 429 in statuses[2:]


async def test_n_choices_each_have_an_end(device: Device) -> None:
    whole = await device.ask(n=2)
    assert [choice["index"] for choice in whole.json["choices"]] == [0, 1]
    streamed = await device.ask(n=2, stream=True)
    assert streamed.finish_reasons == ["stop", "stop"]
    assert streamed.done


async def test_embeddings_are_routed_fall_back_and_are_cached(device: Device) -> None:
    device.engine.fault = "refuse"
    body = {"model": "auto", "input": "hello"}
    async with device.session.post("/v1/embeddings", json=body) as response:
        assert response.status == 200
        assert response.headers["x-causeway-target"] == "large"
        assert response.headers["x-causeway-degraded"] == "true"
        assert (await response.json())["data"][0]["embedding"] == [0.5, 0.25]
    device.engine.fault = "none"
    for status in ("miss", "hit"):
        async with device.session.post("/v1/embeddings", json=body) as response:
            assert response.headers["x-causeway-cache"] == status
            assert (await response.json())["data"][0]["embedding"] == [5.0, 1.0]
    device.assert_nothing_leaks()


async def test_legacy_completions_are_answered(device: Device) -> None:
    async with device.session.post("/v1/completions", json={"model": "small", "prompt": "hello"}) as response:
        assert response.headers["x-causeway-reason"] == "model_named"
        assert (await response.json())["choices"][0]["text"] == EDGE


async def test_a_record_names_the_costly_signals_that_were_not_computed(device: Device) -> None:
    """So that a replay knows absent from unknown."""
    record = await device.record(await device.ask())
    assert set(record.unrecorded) == {"request.prompt_tokens", "edge.quality"}
    assert record.estimates == Estimates()


async def test_records_can_keep_every_signal(tmp_path: Path) -> None:
    """The engine counts the tokens although no rule names them; this model has no quality estimator: absent."""
    async with running(tmp_path, decisions=DecisionsConfig(signals="all")) as device:
        for model in ("auto", "small"):
            record = await device.record(await device.ask(model=model))
            assert record.unrecorded == ()
            assert record.estimates == Estimates(prompt_tokens=1, pii_classes=(), pii_count=0, key_count=0)


async def test_a_record_keeps_the_signals_that_no_rule_names(device: Device) -> None:
    snapshot = (await device.record(await device.ask())).snapshot
    assert snapshot.spend.usd_hour == 0.0
    assert snapshot.edge.queue is not None
    assert snapshot.setup == DeviceSetup(engine=True, cloud=True, temperatures={"m-small": None}, clouds=("main",))


async def test_spend_signals_survive_a_restart(tmp_path: Path) -> None:
    policy = POLICY.replace(
        "  - name: cloud-first",
        "  - name: broke\n    when: spend.usd_hour >= 0.01\n    use: [small]\n  - name: cloud-first",
    )
    async with running(tmp_path, policy=policy) as device:
        assert (await device.ask(tags="cloud")).headers["x-causeway-target"] == "large"
        assert (await device.ask("again", tags="cloud")).headers["x-causeway-reason"] == "broke"
    async with running(tmp_path, policy=policy) as device:
        assert (await device.ask(tags="cloud")).headers["x-causeway-reason"] == "broke"


async def test_only_signals_that_the_policy_names_are_computed(tmp_path: Path) -> None:
    """A policy that does not name the prompt's tokens does not have the engine count them."""
    for rule, counted in (("request.prompt_tokens < 3", True), ("request.n < 3", False)):
        policy = POLICY.replace(
            "  - name: edge-first\n", f"  - name: short\n    when: {rule}\n    use: [small]\n  - name: edge-first\n"
        )
        async with running(tmp_path, policy=policy) as device:
            record = await device.record(await device.ask("one two"))
            assert record.outcome.reason == "short"
            assert record.estimates.prompt_tokens == (2 if counted else None)
            named = await device.record(await device.ask("one two", model="small"))
            assert named.estimates.prompt_tokens is None, "a named model is not routed by rules"


async def older_than(seconds: float) -> None:
    then = time.monotonic()
    await until(lambda: time.monotonic() > then + seconds)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["refuse", "stall", "corrupt"])
async def test_an_engine_that_cannot_count_leaves_the_signal_absent(tmp_path: Path, fault: Fault) -> None:
    """A rule that needs the signal does not hold, the reasons say so, and the next rule decides in time."""
    rule = "  - name: short\n    when: request.prompt_tokens < 3\n    use: [small]\n  - name: edge-first\n"
    policy = hasty("small") if fault == "stall" else POLICY
    async with running(tmp_path, policy=policy.replace("  - name: edge-first\n", rule)) as device:
        device.engine.fault = fault
        answer = await device.ask("one two")
        assert answer.text == CLOUD
        record = await device.record(answer)
        assert record.estimates.prompt_tokens is None
        assert record.decision is not None
        assert ("signal_absent", "short") in [(reason.code, reason.rule) for reason in record.decision.reasons]


def test_the_clock_is_the_event_loops_clock() -> None:
    async def both() -> tuple[float, float]:
        return Clock().monotonic(), asyncio.get_running_loop().time()

    ours, loops = asyncio.run(both())
    assert abs(ours - loops) < 1.0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_an_abandoned_answer_costs_its_prompt(device: Device, stream: bool) -> None:
    """The cloud has read it, whatever of the answer the client waited for; a refused connection costs nothing."""
    device.cloud.gate = asyncio.Event()
    asking = asyncio.ensure_future(device.ask("word " * 3000, stream=stream, tags="cloud"))
    await device.cloud.entered.wait()
    asking.cancel()
    await until(lambda: len(device.parts.decisions.memory) == 1)
    outcome = device.newest().outcome
    assert (outcome.status, [attempt.state for attempt in outcome.attempts]) == ("cancelled", ["cancelled"])
    assert outcome.usd == pytest.approx(3.0, rel=0.3)
    assert outcome.estimated
    assert device.parts.signals.snapshot(device.parts.policies.active).spend.usd_hour == pytest.approx(outcome.usd)


async def test_an_attempt_that_reached_no_target_costs_nothing(device: Device) -> None:
    device.cloud.fault = "refuse"
    answer = await device.ask("word " * 3000, tags="cloud")
    outcome = (await device.record(answer)).outcome
    assert (answer.text, outcome.usd, outcome.estimated) == (EDGE, 0.0, False)
