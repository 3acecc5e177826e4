"""Fallback over tiers of three kinds, on real processes, each killed in turn under load."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from causeway_server.cloud_pool.degradation.config import DegradationConfig
from causeway_server.cloud_pool.tiers.config import TierConfig
from causeway_server.cloud_pool.upstreams.config import UpstreamConfig
from tests.cloud_pool.dispatch.replica import Replica
from tests.edge_node.device import Answer
from tests.edge_node.scripted import CLOUD_WORDS, ScriptedCloud

from .http_gateway import Gateway, http_tier, serving
from .trtllm_triton import TrtllmTriton

pytestmark = [pytest.mark.triton, pytest.mark.slow]
PROMPT = "one two three"
TEXTS = {"vllm": "word", "trtllm": f"{PROMPT} ", "http": "".join(CLOUD_WORDS)}


@pytest.fixture
def tritons(triton_environment: Path, tmp_path: Path) -> Iterator[tuple[Replica, TrtllmTriton]]:
    started = Replica("b", tmp_path, restart=False), TrtllmTriton(tmp_path)
    try:
        for triton in started:
            triton.process.ready()
        yield started
    finally:
        for triton in started:
            triton.process.kill()


def in_triton(name: str, model: str, address: str, folder: Path, upstream: UpstreamConfig) -> TierConfig:
    template = folder / f"{name}.jinja"
    template.write_text("{{ messages[-1].content }}")
    return TierConfig(
        name=name, model=model, triton=address, upstream=upstream, template_file=str(template), context_tokens=512
    )


async def burst(gateway: Gateway, count: int = 20) -> list[Answer]:
    messages = [{"role": "user", "content": PROMPT}]
    return await asyncio.gather(*(gateway.ask(model="vllm", messages=messages, stream=True) for _ in range(count)))


def assert_whole(answer: Answer) -> None:
    assert (answer.status, answer.text) == (200, TEXTS[answer.headers["x-causeway-tier"]]), answer.body
    assert answer.finish_reasons == ["stop"]


async def test_each_kind_takes_over_from_the_one_before(tritons: tuple[Replica, TrtllmTriton], tmp_path: Path) -> None:
    """No request fails before its first token, and none is answered twice, also while a server dies."""
    replica, trtllm = tritons
    cloud = await ScriptedCloud().start()
    tiers = (
        in_triton("vllm", "obedient", replica.address, tmp_path, UpstreamConfig()),
        in_triton("trtllm", "ensemble", trtllm.address, tmp_path, UpstreamConfig(kind="trtllm")),
        http_tier(cloud.url, name="http"),
    )
    order = DegradationConfig(tiers=tuple(TEXTS), warm_up_after_idle_s=0.0)
    deaths = {"vllm": replica.process.kill, "trtllm": trtllm.process.kill}
    async with serving(tmp_path, *tiers, degradation=order) as gateway:
        for name, after in zip(TEXTS, [*list(TEXTS)[1:], ""], strict=True):
            assert {answer.headers["x-causeway-tier"] for answer in await burst(gateway)} == {name}
            if not after:
                break
            dying = asyncio.create_task(burst(gateway))
            await asyncio.to_thread(deaths[name])
            for answer in await dying:
                if answer.finish_reasons:
                    assert_whole(answer)
                else:  # it had begun at the server that died
                    assert TEXTS[name].startswith(answer.text)
                    assert answer.events[-1]["error"]["code"] == "stream_broken"
            for answer in await burst(gateway):
                assert_whole(answer)
    await cloud.stop()
