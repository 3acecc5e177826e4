"""Tiers whose models get images, audio and files themselves, as OpenAI's parts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from causeway_server.cloud_pool.degradation.config import DegradationConfig
from causeway_server.cloud_pool.tiers.config import TierAbility, TierConfig
from causeway_server.cloud_pool.tiers.tier import encoders_of, load_tiers
from causeway_server.cloud_pool.upstreams.config import UpstreamConfig
from causeway_server.router.errors import ConfigError, UnsupportedFeature
from tests.edge_node.scripted import CLOUD_WORDS, ScriptedCloud
from tests.own_task import in_own_task

from .http_gateway import Gateway, http_tier, serving

CLOUD = "".join(CLOUD_WORDS)
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo=", "detail": "low"}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}
FILE = {"type": "file", "file": {"filename": "a.txt", "file_data": "data:text/plain;base64,aGk="}}
TEXT = {"type": "text", "text": "What is it?"}


def messages(*parts: object) -> list[object]:
    return [{"role": "user", "content": [TEXT, *parts]}]


def http(url: str, *abilities: TierAbility, name: str = "large") -> TierConfig:
    return TierConfig(
        name=name, model=name, can=abilities, upstream=UpstreamConfig(kind="openai", urls=(url,), verify_features=False)
    )


@pytest.fixture
async def cloud() -> AsyncIterator[ScriptedCloud]:
    upstream = await ScriptedCloud().start()
    yield upstream
    await upstream.stop()


@pytest.fixture
async def gateway(cloud: ScriptedCloud, tmp_path: Path) -> AsyncIterator[Gateway]:
    tiers = (http(cloud.url, "chat", "image", "audio"), http_tier(cloud.url, name="blind"))
    async with in_own_task(serving(tmp_path, *tiers)) as gateway:
        yield gateway


async def test_the_model_gets_the_parts_as_they_came(gateway: Gateway, cloud: ScriptedCloud) -> None:
    answer = await gateway.ask(messages=messages(IMAGE, AUDIO))
    assert (answer.status, answer.text) == (200, CLOUD), answer.body
    assert "x-causeway-modalities" not in answer.headers
    (sent,) = cloud.bodies
    assert sent["messages"] == messages(IMAGE, AUDIO)


async def test_a_part_of_another_kind_is_refused_by_its_path(gateway: Gateway, cloud: ScriptedCloud) -> None:
    answer = await gateway.ask(messages=messages(IMAGE, FILE))
    assert (answer.status, answer.code) == (400, "unsupported_feature")
    assert answer.json["error"]["param"] == "messages[0].content[2]"
    answer = await gateway.ask(messages=messages(IMAGE), model="blind")
    assert (answer.status, answer.code) == (400, "unsupported_feature")
    assert not cloud.bodies


@pytest.mark.parametrize(
    ("part", "code"),
    [
        ({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}, "unsupported_feature"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,%%%"}}, "invalid_value"),
    ],
    ids=["a URL of the network", "not base64"],
)
async def test_nothing_is_fetched_and_bytes_are_checked(
    gateway: Gateway, cloud: ScriptedCloud, part: dict[str, object], code: str
) -> None:
    answer = await gateway.ask(messages=messages(part))
    assert (answer.status, answer.code) == (400, code)
    assert not cloud.bodies


async def test_too_many_parts_are_refused(gateway: Gateway) -> None:
    answer = await gateway.ask(messages=messages(*[IMAGE] * 9))
    assert (answer.status, answer.code) == (400, "invalid_value")


async def test_a_fallback_tier_that_cannot_see_is_passed_over(cloud: ScriptedCloud, tmp_path: Path) -> None:
    """No encoder reads the image for it; the client reads the error of the tier that could."""
    down = await ScriptedCloud().start()
    await down.stop()
    tiers = (http(down.url, "chat", "image"), http_tier(cloud.url, name="blind"))
    order = DegradationConfig(tiers=("large", "blind"), warm_up_after_idle_s=0.0)
    async with serving(tmp_path, *tiers, degradation=order) as gateway:
        assert (await gateway.ask()).headers["x-causeway-tier"] == "blind"
        answer = await gateway.ask(messages=messages(IMAGE))
        assert (answer.status, answer.code) in [(503, "cloud_unreachable"), (503, "breaker_open")]
    assert len(cloud.bodies) == 1


def test_a_tier_that_takes_parts_is_not_an_encoder() -> None:
    tiers = load_tiers([http("http://a:1/v1", "chat", "image"), TierConfig(name="eyes", can=("image",))])
    assert encoders_of(tiers) == {"image": "eyes"}
    assert tiers[0].paths == ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/realtime")
    with pytest.raises(UnsupportedFeature):
        tiers[0].check_ability("image")


@pytest.mark.parametrize("abilities", [("image",), ("completion", "image")])
def test_parts_are_of_chats(abilities: tuple[TierAbility, ...]) -> None:
    with pytest.raises(ConfigError) as raised:
        load_tiers([http("http://a:1/v1", *abilities)])
    assert raised.value.where == "tiers[0].can"
