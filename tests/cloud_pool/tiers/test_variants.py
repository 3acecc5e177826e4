"""Variants of tiers, at a gateway before a real HTTP upstream: assignment, faults, verdicts, reloads, feedback."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from causeway_server.cloud_pool.app import reload_tiers
from causeway_server.cloud_pool.cache.config import CacheConfig
from causeway_server.cloud_pool.cache.shared_cache import CacheKeys
from causeway_server.cloud_pool.config import Config
from causeway_server.cloud_pool.tiers.config import TierConfig, TierVariantConfig
from causeway_server.cloud_pool.tiers.tier import ChatFormat, Tier
from causeway_server.cloud_pool.tiers.variants import ScorableAnswer, TierVariants, check_variants
from causeway_server.router.errors import ConfigError
from causeway_server.router.types import Message, Request
from causeway_server.router.variants.feedback import Feedback
from causeway_server.router.variants.settings import TrialConfig, VerdictMetric
from tests.cloud_pool.upstreams.http_gateway import Gateway, http_tier, serving
from tests.edge_node.device import Answer
from tests.edge_node.scripted import CLOUD_WORDS, Fault, ScriptedCloud
from tests.waiting import until

TRIAL = TrialConfig(metrics=(VerdictMetric("errors"), VerdictMetric("feedback")), least=20)


class TwoModels(ScriptedCloud):
    """A server whose model `v2` has a fault."""

    v2_fault: Fault = "none"
    v2_words = CLOUD_WORDS

    async def _answer(self, request: web.Request, body: dict[str, object]) -> web.StreamResponse:
        self.fault = self.v2_fault if body["model"] == "v2" else "none"
        self.words = self.v2_words if body["model"] == "v2" else CLOUD_WORDS
        return await super()._answer(request, body)


@pytest.fixture
async def cloud() -> AsyncIterator[TwoModels]:
    upstream = TwoModels()
    await upstream.start()
    yield upstream
    await upstream.stop()


def tier(cloud: ScriptedCloud, share: float, model: str = "v2") -> TierConfig:
    return http_tier(cloud.url, variants=(TierVariantConfig(model, share),), trial=TRIAL)


def shadowed(cloud: ScriptedCloud, share: float = 100.0) -> TierConfig:
    return http_tier(cloud.url, variants=(TierVariantConfig("v2", share, shadow=True),), trial=TRIAL)


async def ask(gateway: Gateway, text: str = "hello", **fields: object) -> Answer:
    body = {"model": "large", "messages": [{"role": "user", "content": text}], **fields}
    return await gateway.post("/chat/completions", body)


async def score(gateway: Gateway, answer: Answer, value: float) -> Answer:
    return await gateway.post("/feedback", {"id": answer.headers["X-Request-ID"], "score": value})


def variants_of(gateway: Gateway) -> TierVariants:
    return gateway.app.runtime.service.variants


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_variant_answers_and_header_audit_and_metrics_name_it(
    cloud: TwoModels, tmp_path: Path, stream: bool
) -> None:
    async with serving(tmp_path, tier(cloud, 100)) as gateway:
        answer = await ask(gateway, stream=stream)
        assert (answer.status, answer.text) == (200, "".join(CLOUD_WORDS))
        assert (answer.headers["x-causeway-tier"], answer.headers["x-causeway-variant"]) == ("large", "v2")
        assert cloud.bodies[-1]["model"] == "v2"
        assert "x-causeway-degraded" not in answer.headers
        metrics = gateway.app.runtime.metrics.text().decode()
        assert 'causeway_gateway_variant_answers_total{result="ok",tier="large",variant="v2"} 1.0' in metrics
        assert 'causeway_gateway_variant_share{state="running",tier="large",variant="v2"} 1.0' in metrics
    assert [record["variant"] for record in gateway.audit] == ["v2"]


async def test_embeddings_are_of_the_tier_s_own_model(cloud: TwoModels, tmp_path: Path) -> None:
    async with serving(tmp_path, tier(cloud, 100)) as gateway:
        answer = await gateway.post("/embeddings", {"model": "large", "input": "a"})
        assert answer.status == 200
        assert cloud.bodies[-1]["model"] == "m"


@pytest.mark.parametrize("fault", ["refuse", "corrupt"])
async def test_a_variant_that_fails_costs_no_answer_and_is_returned(
    cloud: TwoModels, tmp_path: Path, fault: Fault
) -> None:
    """The tier's own model answers in its place, at first for each request and then for all."""
    cloud.v2_fault = fault
    async with serving(tmp_path, tier(cloud, 50)) as gateway:
        for number in range(100):
            answer = await ask(gateway, str(number))
            assert (answer.status, answer.headers.get("x-causeway-variant")) == (200, None)
        (problem,) = variants_of(gateway).problems
        assert problem.startswith(
            "The variant v2 of large is returned and answers 0 % of the requests: errors: 100.00%"
        )
        asked = len(cloud.bodies)
        for number in range(20):
            await ask(gateway, str(number))
        assert [body["model"] for body in cloud.bodies[asked:]] == ["m"] * 20


async def test_a_variant_that_breaks_in_mid_answer_counts_as_failed(cloud: TwoModels, tmp_path: Path) -> None:
    cloud.v2_fault = "die"
    async with serving(tmp_path, tier(cloud, 100)) as gateway:
        await ask(gateway, stream=True)
        metrics = gateway.app.runtime.metrics.text().decode()
        assert 'causeway_gateway_variant_answers_total{result="failed",tier="large",variant="v2"} 1.0' in metrics


async def test_feedback_returns_a_variant_that_clients_like_less(cloud: TwoModels, tmp_path: Path) -> None:
    async with serving(tmp_path, tier(cloud, 50)) as gateway:
        for number in range(100):
            answer = await ask(gateway, str(number))
            found = await score(gateway, answer, 0.0 if "x-causeway-variant" in answer.headers else 1.0)
            assert (found.status, found.json["counted"]) == (200, True)
        assert "feedback: 100.00%" in variants_of(gateway).problems[0]
        assert (await score(gateway, answer, 1.0)).json["counted"] is False
        metrics = gateway.app.runtime.metrics.text().decode()
        assert 'causeway_gateway_feedback_total{result="bad",tier="large",variant="v2"}' in metrics


async def test_feedback_about_an_unknown_answer_is_404(cloud: TwoModels, tmp_path: Path) -> None:
    async with serving(tmp_path, http_tier(cloud.url)) as gateway:
        answer = await gateway.post("/feedback", {"id": "no-such-answer", "score": 1})
        assert (answer.status, answer.code) == (404, "not_found")
        assert (await gateway.post("/feedback", {"id": "a", "score": 3})).status == 400


def test_only_the_client_of_an_answer_may_score_it() -> None:
    """Neither another tenant nor another device of the same one."""
    variants = TierVariants()
    variants.answers["a"] = ScorableAnswer(("acme", "d1"), "large", "", None)
    for tenant, client in (("other", "d1"), ("acme", "d2"), ("", "")):
        assert variants.count_score(tenant, client, Feedback("a", 1.0)) is None
    assert variants.count_score("acme", "d1", Feedback("a", 1.0)) is True
    assert variants.count_score("acme", "d1", Feedback("a", 1.0)) is False


async def test_variants_are_added_moved_and_removed_without_a_restart(cloud: TwoModels, tmp_path: Path) -> None:
    async with serving(tmp_path, http_tier(cloud.url)) as gateway:
        runtime, config = gateway.app.runtime, gateway.app.config

        async def reloaded(*tiers: TierConfig) -> str:
            def reread() -> Config:
                return msgspec.structs.replace(config, tiers=tiers)

            reload_tiers(runtime.pools, runtime.service.variants, config, reread)
            return (await ask(gateway)).headers.get("x-causeway-variant", "")

        assert (await ask(gateway)).headers.get("x-causeway-variant") is None
        assert await reloaded(tier(cloud, 100)) == "v2"
        assert await reloaded(tier(cloud, 100, "v3")) == "v3"
        with pytest.raises(ConfigError, match="already the tier's own model"):
            await reloaded(tier(cloud, 100, "m"))
        assert (await ask(gateway)).headers["x-causeway-variant"] == "v3"
        assert await reloaded(http_tier(cloud.url)) == ""


def test_variants_share_no_cached_answer_with_their_tier() -> None:
    request = Request(kind="chat", model="large", messages=(Message("user", "hello"),))
    config = TierConfig(name="large", model="m", variants=(TierVariantConfig("v2", 100),))
    own = Tier(config, ChatFormat(""))
    variants, keys = TierVariants([config]), CacheKeys(CacheConfig())
    varied = variants.of(own, request)
    assert (varied.model, varied.variant, varied.name) == ("v2", "v2", "large")
    assert keys.key(request, own, "acme") != keys.key(request, varied, "acme")
    assert keys.key(request, varied, "acme") == keys.key(request, variants.of(own, request), "acme")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"variants": (TierVariantConfig("m", 5),)}, r"tiers\[0\].variants\[0\].model"),
        ({"variants": (TierVariantConfig("v2", 5), TierVariantConfig("v2", 6))}, r"tiers\[0\].variants\[1\].model"),
        ({"variants": (TierVariantConfig("v2", 5),), "can": ("embedding",)}, r"tiers\[0\].variants: Only tiers"),
        ({"trial": TrialConfig(least=50)}, r"tiers\[0\].trial"),
    ],
)
def test_variants_that_cannot_be_are_refused_with_their_path(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_variants([TierConfig(name="large", model="m", **fields)])  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("share", [50, 100])
async def test_a_variant_that_hangs_costs_no_answer_and_is_returned(
    cloud: TwoModels, tmp_path: Path, share: float
) -> None:
    """The tier's own model answers within the deadline, and the tier's breaker stays closed."""
    cloud.v2_fault = "stall"
    slow = msgspec.structs.replace(tier(cloud, share), ttft_objective_s=0.02)
    async with serving(tmp_path, slow) as gateway:
        for number in range(200):
            answer = await ask(gateway, str(number))
            assert (answer.status, answer.headers.get("x-causeway-variant")) == (200, None), answer.body
            if variants_of(gateway).problems:
                break
        assert "errors: 100.00%" in variants_of(gateway).problems[0]
        assert 'causeway_gateway_breaker_open{tier="large"} 0.0' in gateway.app.runtime.metrics.text().decode()
        asked = len(cloud.bodies)
        for number in range(10):
            assert (await ask(gateway, str(number))).status == 200
        assert {body["model"] for body in cloud.bodies[asked:]} == {"m"}


async def test_a_variant_that_leaves_half_of_a_short_deadline(cloud: TwoModels, tmp_path: Path) -> None:
    cloud.v2_fault = "stall"
    async with serving(tmp_path, tier(cloud, 100)) as gateway:
        answer = await gateway.ask(headers={"x-causeway-deadline-ms": "1500"})
        assert (answer.status, answer.text) == (200, "".join(CLOUD_WORDS)), answer.body
        assert {sent["model"] for sent in cloud.bodies} == {"v2", "m"}


async def test_a_variant_that_tells_another_session_s_words_is_returned_by_a_label_of_its_owner(
    cloud: TwoModels, tmp_path: Path
) -> None:
    """Clients who find another's words score the label `leak` with 0; a single point more is too much."""
    trial = TrialConfig(metrics=(VerdictMetric("leak", margin=0.0),), least=20)
    leaking = msgspec.structs.replace(tier(cloud, 50), trial=trial)
    async with serving(tmp_path, leaking) as gateway:
        for number in range(200):
            answer = await ask(gateway, str(number))
            assert answer.status == 200, (number, answer.body)
            leaks = "x-causeway-variant" in answer.headers and number % 4 == 0
            score = {"id": answer.headers["X-Request-ID"], "score": 0.0 if leaks else 1.0, "label": "leak"}
            assert (await gateway.post("/feedback", score)).status == 200
        assert variants_of(gateway).problems[0].startswith("The variant v2 of large is returned")
        assert "leak: " in variants_of(gateway).problems[0]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("fault", "result"), [("none", "same"), ("refuse", "failed"), ("die", "failed"), ("corrupt", "failed")]
)
async def test_a_shadow_variant_gets_copies_and_its_answers_are_compared_and_never_shown(
    cloud: TwoModels, tmp_path: Path, fault: Fault, result: str, stream: bool
) -> None:
    cloud.v2_fault = fault
    async with serving(tmp_path, shadowed(cloud)) as gateway:
        answer = await ask(gateway, stream=stream)
        assert (answer.status, answer.text) == (200, "".join(CLOUD_WORDS))
        assert "x-causeway-variant" not in answer.headers
        sample = f'causeway_gateway_variant_answers_total{{result="{result}",tier="large",variant="v2"}} 1.0'
        await until(lambda: sample in gateway.app.runtime.metrics.text().decode())
    models = [body["model"] for body in cloud.bodies]
    assert (models[0], models.count("v2") > 0) == ("m", True)
    (record,) = gateway.audit
    assert (record["variant"], record["outcome"]) == ("", "ok")
    assert record["completion_tokens"] == len(CLOUD_WORDS)


async def test_an_answer_of_a_shadow_variant_that_differs_is_counted(cloud: TwoModels, tmp_path: Path) -> None:
    cloud.v2_words = ("cloud ", "says ", "otherwise")
    async with serving(tmp_path, shadowed(cloud)) as gateway:
        assert (await ask(gateway)).text == "".join(CLOUD_WORDS)
        sample = 'causeway_gateway_variant_answers_total{result="differs",tier="large",variant="v2"} 1.0'
        await until(lambda: sample in gateway.app.runtime.metrics.text().decode())


async def test_a_shadow_variant_that_hangs_holds_up_nobody(cloud: TwoModels, tmp_path: Path) -> None:
    cloud.v2_fault = "stall"
    async with serving(tmp_path, shadowed(cloud)) as gateway:
        for _ in range(3):
            assert (await ask(gateway)).text == "".join(CLOUD_WORDS)
        await until(lambda: [body["model"] for body in cloud.bodies].count("v2") == 3)
        assert (await ask(gateway)).text == "".join(CLOUD_WORDS)


async def test_a_shadow_variant_that_fails_is_returned_and_gets_no_more_copies(
    cloud: TwoModels, tmp_path: Path
) -> None:
    cloud.v2_fault = "refuse"
    async with serving(tmp_path, shadowed(cloud)) as gateway:
        for number in range(200):
            assert (await ask(gateway, f"question {number}")).status == 200
            (trial,) = variants_of(gateway).trials
            if trial.state == "returned":
                break
        assert trial.state == "returned"
        request = Request(kind="chat", model="large", messages=(Message("user", "one more"),))
        assert variants_of(gateway).trials.assigned(request, shadow=True) == {}


async def test_a_shadow_variant_gets_no_private_request(cloud: TwoModels, tmp_path: Path) -> None:
    async with serving(tmp_path, shadowed(cloud)) as gateway:
        assert (await gateway.ask(headers={"x-causeway-tags": "private"})).text == "".join(CLOUD_WORDS)
        await ask(gateway, "a public question")
        await until(lambda: [body["model"] for body in cloud.bodies].count("v2") == 1)
    (copy,) = [body for body in cloud.bodies if body["model"] == "v2"]
    assert "a public question" in str(copy["messages"])


def test_a_session_that_a_variant_answered_does_not_stay_there_when_it_becomes_a_shadow() -> None:
    config = TierConfig(name="large", model="m", variants=(TierVariantConfig("v2", 100),))
    own = Tier(config, ChatFormat(""))
    variants = TierVariants([config])
    assert [one.variant for one in variants.named(own, "v2")] == ["v2"]
    variants.use([msgspec.structs.replace(config, variants=(TierVariantConfig("v2", 100, shadow=True),))])
    assert variants.named(own, "v2") == ()


def test_a_shadow_variant_cannot_be_promoted() -> None:
    trial = TrialConfig(promote=True)
    config = TierConfig(model="m", variants=(TierVariantConfig("v2", 5, shadow=True),), trial=trial)
    with pytest.raises(ConfigError, match="never get") as caught:
        check_variants([config])
    assert caught.value.where == "tiers[0].variants[0].shadow"
