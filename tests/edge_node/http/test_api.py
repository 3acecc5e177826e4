"""The API beside answers: models, explanations, decision records, health and metrics."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from yarl import URL

from causeway_server.router.types import DeviceSignals
from tests.waiting import until

from ..device import POLICY, Device, running
from ..scripted import ScriptedEngine


async def test_models_are_auto_and_the_targets(device: Device) -> None:
    models = (await device.get("/v1/models")).json["data"]
    assert [(model["id"], model["owned_by"]) for model in models] == [
        ("auto", "causeway"),
        ("small", "edge"),
        ("large", "cloud"),
    ]
    assert (await device.get("/v1/models/large")).json["id"] == "large"


async def test_an_unknown_model_is_a_404(device: Device) -> None:
    """The message names the models that exist."""
    answer = await device.ask(model="gpt-99")
    assert (answer.status, answer.code) == (404, "model_not_found")
    assert "auto, small, large" in answer.message
    device.assert_nothing_leaks()


@pytest.mark.parametrize("path", ["/v1/models/", "/v1//models", "/v1/decisions/?limit=1", "/v1/models/small/"])
async def test_slashes_that_a_base_url_leaves_make_no_other_path(device: Device, path: str) -> None:
    await device.ask()
    await until(lambda: len(device.parts.decisions.memory) == 1)
    found, plain = (
        await device.get(path),
        await device.get("/" + "/".join(filter(None, path.split("/"))).replace("/?", "?")),
    )
    assert (found.status, found.body) == (200, plain.body)


@pytest.mark.parametrize(
    ("body", "first"),
    [
        ({"messages": [{"role": "user", "content": "hi"}]}, "small"),
        ({"prompt": "hi"}, "small"),
        ({"input": "hi"}, "small"),
        ({"messages": [{"role": "user", "content": "hi"}], "causeway": {"tags": ["cloud"]}}, "large"),
    ],
    ids=["chat", "completion", "embedding", "tagged"],
)
async def test_route_explains_and_runs_nothing(device: Device, body: dict[str, object], first: str) -> None:
    """Attempts, reasons and signals; no target is called and nothing is recorded."""
    async with device.session.post(
        "/v1/route",
        json={"model": "auto", "temperature": 0, **body} if "input" not in body else {"model": "auto", **body},
    ) as response:
        assert response.status == 200
        body_json = await response.json()
    assert body_json["decision"]["attempts"][0]["target"]["name"] == first
    assert {"code", "rule", "target", "detail"} <= set(body_json["decision"]["reasons"][0])
    assert body_json["cache"]["exact"]["ttl_s"] == 30.0
    assert body_json["cached_age_s"] is None
    assert body_json["snapshot"]["edge"]["loaded"] is True
    assert device.engine.calls == []
    assert device.cloud.bodies == []
    assert len(device.parts.decisions.memory) == 0


async def test_route_reports_the_age_of_a_cached_answer(device: Device) -> None:
    await device.ask(temperature=0)
    body = {"model": "auto", "temperature": 0, "messages": [{"role": "user", "content": "hello"}]}
    async with device.session.post("/v1/route", json=body) as response:
        assert 0 <= (await response.json())["cached_age_s"] < 5


VECTORS = '  - name: vectors\n    when: request.kind == "embedding"\n    use: [small]\n'


async def test_route_knows_the_body_of_a_response_from_that_of_embeddings(tmp_path: Path) -> None:
    """Both have `input`."""
    policy = POLICY.replace("  - name: cloud-first\n", VECTORS + "  - name: cloud-first\n")
    bodies: list[tuple[dict[str, object], str]] = [
        ({"input": "hello"}, "vectors"),
        ({"input": ["hello", "you"], "dimensions": 2}, "vectors"),
        ({"input": "hello", "store": False}, "edge-first"),
        ({"input": [{"role": "user", "content": "hello"}]}, "edge-first"),
        ({"input": "hello", "max_output_tokens": 5}, "edge-first"),
    ]
    async with running(tmp_path, policy=policy) as device:
        for body, rule in bodies:
            async with device.session.post("/v1/route", json={"model": "auto", **body}) as response:
                assert (await response.json())["decision"]["rule"] == rule


async def test_route_refuses_an_invalid_body(device: Device) -> None:
    async with device.session.post("/v1/route", json={"messages": 7}) as response:
        assert response.status == 400


async def test_decisions_can_be_searched(device: Device) -> None:
    first = await device.ask("one", temperature=0)
    await device.ask("one", temperature=0)
    third = await device.ask("three", tags="cloud")
    device.engine.fault, device.cloud.fault = "refuse", "refuse"
    failed = await device.ask("four")

    async def ids(query: str) -> list[str]:
        found = (await device.get(f"/v1/decisions?{query}")).json["data"]
        return [record["id"] for record in found]

    assert len(await ids("")) == 4
    assert await ids("limit=1") == [failed.headers["x-causeway-decision"]]
    assert await ids("route=cloud") == [third.headers["x-causeway-decision"]]
    assert await ids("target=small&route=edge") == [first.headers["x-causeway-decision"]]
    assert await ids("status=error") == [failed.headers["x-causeway-decision"]]
    assert len(await ids("route=cache")) == 1
    assert await ids("since=9999999999") == []


async def test_readyz_is_503_while_no_target_can_answer(tmp_path: Path) -> None:
    """The body names what is missing: the engine is loading, the cloud is unreachable."""
    engine = ScriptedEngine()
    async with running(tmp_path, engine=engine) as device:
        assert (await device.get("/readyz")).status == 200
        engine.state = "loading"
        await device.cloud.stop()
        await device.parts.clouds.first.probe()  # type: ignore[union-attr]
        body_json = await device.get("/readyz")
        assert body_json.status == 503
        assert body_json.json["waiting_for"] == ["target small", "target large"]
        assert (body_json.json["edge"], body_json.json["cloud"]) == ("loading", "unreachable")
        assert (await device.get("/healthz")).status == 200
        engine.state = "ready"
        assert (await device.get("/readyz")).json["ready"] is True


async def test_a_rejected_policy_is_reported_and_the_last_good_one_stays_active(tmp_path: Path) -> None:
    """/readyz names file, line and key; the metrics count it."""
    async with running(tmp_path) as device:
        (tmp_path / "policy.yaml").write_text(POLICY.replace("version: 1", "version: 1\ncolour: red"))
        await device.parts.policies.reload()
        policy = (await device.get("/readyz")).json["policy"]
        assert "policy.yaml:3" in policy["refused"]
        assert "colour" in policy["refused"]
        metrics = numbers((await device.get("/metrics")).body)
        assert metrics["causeway_edge_policy_rejected", ()] == 1.0
        assert metrics["causeway_edge_policy_loads_total", (("result", "refused"),)] == 1.0
        assert (await device.ask()).status == 200


@pytest.mark.slow
async def test_a_changed_policy_file_is_activated(tmp_path: Path) -> None:
    async with running(tmp_path) as device:
        await device.ask()
        changed = POLICY.replace("use: [small, large]\ncache", "use: [large]\ncache").replace("queue: 4}", "queue: 0}")
        (tmp_path / "policy.yaml").write_text(changed)
        await until(lambda: device.parts.policies.active.limits.queue == 0)
        assert (await device.ask()).headers["x-causeway-target"] == "large"


async def test_metrics_count_requests_with_bounded_labels(device: Device) -> None:
    """Requests by route, target, status and cache; GenAI histograms; no model name that a client invented."""
    await device.ask("one", temperature=0)
    await device.ask("one", temperature=0)
    device.engine.fault = "refuse"
    await device.ask("two")
    await device.ask("three", model="m-large")
    async with device.session.post("/v1/chat/completions", data=b"{", headers={"Content-Type": "application/json"}):
        pass
    metrics = numbers((await device.get("/metrics")).body)
    request = "causeway_edge_requests_total"
    assert metrics[request, (("cache", "miss"), ("route", "edge"), ("status", "ok"), ("target", "small"))] == 1
    assert metrics[request, (("cache", "hit"), ("route", "cache"), ("status", "ok"), ("target", "small"))] == 1
    assert metrics[request, (("cache", "bypass"), ("route", "cloud"), ("status", "ok"), ("target", "large"))] == 2
    assert metrics["causeway_edge_fallbacks_total", (("target", "large"),)] == 1
    assert metrics["causeway_edge_requests_rejected_total", (("code", "invalid_json"),)] == 1
    attempt = (("error", "engine_unavailable"), ("state", "failed"), ("target", "small"))
    assert metrics["causeway_edge_attempts_total", attempt] == 1
    assert metrics["causeway_edge_tokens_total", (("target", "large"), ("type", "input"))] == 14
    assert metrics["causeway_edge_cost_usd_total", (("target", "large"),)] == pytest.approx(0.02)
    genai = (("gen_ai_operation_name", "chat"), ("gen_ai_request_model", "other"), ("gen_ai_response_model", "m-large"))
    assert metrics["gen_ai_server_time_to_first_token_count", genai] == 1
    assert metrics["causeway_edge_requests_running", ()] == 0
    assert metrics["causeway_edge_store_lost_writes_total", (("store", "cache"),)] == 0
    assert metrics["causeway_edge_engine_restarts_total", (("model", "m-small"),)] == 0


async def test_the_devices_last_readings_are_metrics(device: Device) -> None:
    """In Prometheus' units. What this device cannot read has no series, and a scrape reads no sensor."""
    readings = DeviceSignals(temperature_c=71.5, throttled=True, memory_free_mb=2.0, cpu=0.25)
    device.parts.signals.device = readings
    device.parts.signals.read_device = lambda _: pytest.fail("a scrape has read the sensors")
    metrics = numbers((await device.get("/metrics")).body)
    found = {name: value for (name, _), value in metrics.items() if name.startswith("causeway_edge_device_")}
    assert found == {
        "causeway_edge_device_temperature_celsius": 71.5,
        "causeway_edge_device_throttled": 1.0,
        "causeway_edge_device_memory_free_bytes": 2.0 * 2**20,
        "causeway_edge_device_cpu_ratio": 0.25,
    }


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("?state=ok", "Use one of: route, target, status, since, limit"),
        ("?status=bad", "must be one of ok, error, cancelled, rejected"),
        ("?route=fog", "must be one of edge, cloud, cache, none"),
        ("?since=today", "`since` must be a number of at least 0, not 'today'"),
    ],
)
async def test_an_unknown_filter_of_decisions_is_answered_with_the_known_ones(
    device: Device, query: str, words: str
) -> None:
    answer = await device.get(f"/v1/decisions{query}")
    assert answer.status == 400
    assert words in answer.message


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/chat/completions", "There is nothing at /chat/completions; did you mean /v1/chat/completions?"),
        ("/v1/v1/models", "did you mean /v1/models?"),
        ("/", "the API is under /v1, the page at /console"),
        ("/v1", "the API is under /v1, the page at /console"),
    ],
)
async def test_a_wrong_base_url_is_answered_with_the_right_path(device: Device, path: str, words: str) -> None:
    answer = await device.get(path)
    assert (answer.status, words in answer.message) == (404, True), answer.message


@pytest.mark.parametrize("path", ["/v1/chat/completions/", "//v1/chat/completions", "/v1///chat/completions//"])
async def test_a_slash_too_many_reaches_the_same_handler(device: Device, path: str) -> None:
    """The path is as it is joined by clients whose base URL ends with a slash."""
    body = {"model": "auto", "messages": [{"role": "user", "content": "hello"}]}
    async with device.session.post(URL(f"http://127.0.0.1:{device.app.port}{path}"), json=body) as response:
        assert (response.status, response.history) == (200, ())
    assert (await device.get("/v1/models/")).json == (await device.get("/v1/models")).json
    async with device.session.post("/v1/nothing/", json=body) as response:
        assert response.status == 404


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/small/", "/v1/models/gpt-99", "/metrics", "/console"])
async def test_head_is_answered_as_get_without_the_body(device: Device, path: str) -> None:
    whole = await device.get(path)
    async with device.session.head(path) as head:
        assert (head.status, head.headers["Content-Type"]) == (whole.status, whole.headers["Content-Type"])
        assert path == "/metrics" or head.headers["Content-Length"] == whole.headers["Content-Length"]
        assert await head.read() == b""


async def test_head_where_no_get_is_is_405(device: Device) -> None:
    async with device.session.head("/v1/chat/completions") as head:
        assert (head.status, head.headers["Allow"]) == (405, "POST")


async def test_only_rejected_requests_for_an_answer_are_counted(device: Device) -> None:
    """Errors of explanations, records and unknown paths are none."""
    for path in ("/v1/route", "/v1/nothing", "/v1/completions"):
        async with device.session.post(path, data=b"{", headers={"Content-Type": "application/json"}) as response:
            assert response.status in (400, 404)
    assert (await device.get("/v1/decisions/none")).status == 404
    rejected = {
        labels: value
        for (name, labels), value in numbers((await device.get("/metrics")).body).items()
        if name == "causeway_edge_requests_rejected_total"
    }
    assert rejected == {(("code", "invalid_json"),): 1}


def numbers(text: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }
