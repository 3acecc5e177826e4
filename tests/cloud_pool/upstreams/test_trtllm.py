"""A gateway before a real Triton with stand-ins that have published tensors: TensorRT-LLM's and the vLLM backend's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from causeway_server.cloud_pool.config import Flags, load_config
from causeway_server.cloud_pool.tiers.config import TierAbility, TierConfig
from causeway_server.cloud_pool.tiers.tier import load_tiers
from causeway_server.cloud_pool.upstreams.config import UpstreamConfig, UpstreamKind
from causeway_server.router.errors import ConfigError
from tests.own_task import in_own_task
from tests.waiting import until

from .http_gateway import Gateway, serving
from .trtllm_triton import TrtllmTriton

pytestmark = [pytest.mark.triton, pytest.mark.slow]
KINDS: dict[str, UpstreamKind] = {"ensemble": "trtllm", "tensorrt_llm": "trtllm_llmapi"}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object", "properties": {"a": {}}}}}


@pytest.fixture(scope="module")
def triton(triton_environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrtllmTriton]:
    found = TrtllmTriton(tmp_path_factory.mktemp("trtllm"))
    try:
        found.process.ready()
        yield found
    finally:
        found.process.stop()


def tier(model: str, address: str, template: Path) -> TierConfig:
    template.write_text("{{ messages[-1].content }}")
    upstream = UpstreamConfig(kind=KINDS[model])
    return TierConfig(
        name=model, model=model, triton=address, upstream=upstream, template_file=str(template), context_tokens=512
    )


@pytest.fixture
async def gateway(triton: TrtllmTriton, tmp_path: Path) -> AsyncIterator[Gateway]:
    tiers = [tier(model, triton.address, tmp_path / "template.jinja") for model in KINDS]
    async with in_own_task(serving(tmp_path, *tiers)) as gateway:
        yield gateway


def says(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("model", KINDS)
async def test_an_answer_comes_token_by_token(gateway: Gateway, model: str, stream: bool) -> None:
    answer = await gateway.ask(model=model, messages=says("grüße an alle"), stream=stream)
    assert (answer.status, answer.text) == (200, "grüße an alle "), answer.body
    if stream:
        assert answer.finish_reasons == ["stop"]
        assert len([event for event in answer.events if event["choices"]]) >= 3
    else:
        assert answer.json["usage"]["completion_tokens"] == 3
        assert answer.json["usage"]["prompt_tokens"] == (3 if model == "ensemble" else 0)


@pytest.mark.parametrize("model", KINDS)
async def test_an_answer_at_its_limit_says_so(gateway: Gateway, model: str) -> None:
    answer = await gateway.ask(model=model, messages=says("a b c d"), max_tokens=2)
    assert answer.text == "a b "
    assert answer.json["choices"][0]["finish_reason"] == "length"


async def test_the_ensembles_inputs_have_their_published_names(gateway: Gateway) -> None:
    answer = await gateway.ask(
        model="ensemble",
        messages=says("parameters"),
        max_tokens=9,
        temperature=0.5,
        top_p=0.25,
        presence_penalty=0.5,
        seed=7,
        stop=["x", "y"],
        response_format=SCHEMA,
    )
    given = json.loads(answer.text)
    assert json.loads(given.pop("guided_decoding_guide")[0])["type"] == "object"
    assert given == {
        "text_input": ["parameters"],
        "max_tokens": [9],
        "temperature": [0.5],
        "top_p": [0.25],
        "presence_penalty": [0.5],
        "seed": [7],
        "stop_words": ["x", "y"],
        "guided_decoding_guide_type": ["json_schema"],
        "stream": [True],
        "exclude_input_in_output": [True],
        "return_num_input_tokens": [True],
        "return_num_output_tokens": [True],
    }


async def test_the_llm_apis_inputs_have_their_published_names(gateway: Gateway) -> None:
    answer = await gateway.ask(model="tensorrt_llm", messages=says("parameters"), max_tokens=9, temperature=0, stop="x")
    assert json.loads(answer.text) == {
        "text_input": ["parameters"],
        "streaming": [True],
        "sampling_param_max_tokens": [9],
        "sampling_param_top_k": [1],
        "sampling_param_stop": ["x"],
        "sampling_param_exclude_input_from_output": [True],
        "return_finish_reason": [True],
    }


@pytest.mark.parametrize(
    ("model", "fields", "param"),
    [
        ("ensemble", {"logprobs": True}, "logprobs"),
        ("ensemble", {"logit_bias": {"5": 1}}, "logit_bias"),
        ("tensorrt_llm", {"logprobs": True}, "logprobs"),
        ("tensorrt_llm", {"response_format": SCHEMA}, "response_format"),
        ("tensorrt_llm", {"repetition_penalty": 1.5}, "repetition_penalty"),
    ],
)
async def test_what_has_no_tensor_is_refused_by_name(
    gateway: Gateway, model: str, fields: dict[str, object], param: str
) -> None:
    answer = await gateway.post("/chat/completions", {"model": model, "messages": says("a"), **fields})
    assert (answer.status, answer.code) == (400, "unsupported_feature"), answer.body
    assert answer.json["error"]["param"] == param


# --- images for a model of Triton's vLLM backend ----------------------------------------------------------------------


IMAGES = ["iVBORw0KGgo=", "R0lGODlh"]
SEEING = "{% for part in messages[-1].content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}"


@pytest.fixture
async def seeing(triton: TrtllmTriton, tmp_path: Path) -> AsyncIterator[Gateway]:
    template = tmp_path / "seeing.jinja"
    template.write_text(
        "{% if messages[-1].content is string %}{{ messages[-1].content }}{% else %}" + SEEING + "{% endif %}"
    )
    tier = TierConfig(
        name="vision",
        triton=triton.address,
        can=("chat", "image"),
        template_file=str(template),
        special_tokens=("<image>",),
        context_tokens=512,
    )
    async with in_own_task(serving(tmp_path, tier)) as gateway:
        yield gateway


def with_images(*urls: str, text: str = "Which is larger?") -> list[dict[str, object]]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [parts[0], {"type": "text", "text": text}, *parts[1:]]}]


async def test_images_reach_the_tensor_in_the_order_of_their_places(seeing: Gateway) -> None:
    """A caller's text cannot spell the place of an image."""
    urls = [f"data:image/png;base64,{image}" for image in IMAGES]
    answer = await seeing.ask(model="vision", messages=with_images(*urls, text="Which <image> is larger?"))
    assert answer.status == 200, answer.body
    given = json.loads(answer.text)
    assert given["image"] == IMAGES
    assert given["text_input"] == ["<image>Which < image> is larger?<image>"]
    assert answer.json["usage"]["prompt_tokens"] == 7


async def test_without_an_image_there_is_no_such_tensor(seeing: Gateway) -> None:
    answer = await seeing.ask(model="vision", messages=says("hello"))
    assert "image" not in json.loads(answer.text)


@pytest.mark.parametrize(
    ("url", "code"),
    [("https://example.com/a.png", "unsupported_feature"), ("data:image/png;base64,%%%", "invalid_value")],
)
async def test_an_image_of_the_network_or_of_broken_bytes_is_refused(seeing: Gateway, url: str, code: str) -> None:
    answer = await seeing.ask(model="vision", messages=with_images(url))
    assert (answer.status, answer.code) == (400, code), answer.body


@pytest.mark.parametrize("model", KINDS)
async def test_a_client_that_leaves_frees_its_permit(gateway: Gateway, model: str) -> None:
    """The call is cancelled; the model answers on."""
    asking = asyncio.create_task(gateway.ask(model=model, messages=says("a b wait"), stream=True))
    running = gateway.app.runtime.admissions[model].scheduler
    await until(lambda: running.running == 1)
    asking.cancel()
    await until(lambda: running.running == 0)
    assert (await gateway.ask(model=model, messages=says("hello"))).text == "hello "


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("can", ("chat", "embedding")),
        ("can", ("audio",)),
        ("adapter", "legal"),
        ("adapters", {"large-legal": "legal"}),
        ("template_file", ""),
    ],
)
def test_what_the_kind_cannot_do_is_refused_at_start(tmp_path: Path, key: str, value: object) -> None:
    (tmp_path / "t").write_text("x")
    fields = {"template_file": str(tmp_path / "t"), key: value}
    config = TierConfig(name="large", upstream=UpstreamConfig(kind="trtllm"), **fields)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as raised:
        load_tiers([config])
    assert raised.value.where == f"tiers[0].{key}"


@pytest.mark.parametrize(
    ("template", "abilities", "key"),
    [
        ("{{ messages[-1].content }}", ("chat", "image", "audio"), "can"),
        ("{{ messages[-1].content }}", ("completion", "image"), "can"),
        ("", ("chat", "image"), "can"),
        (
            "{% for part in messages[-1].content if part.text %}{{ part.text }}{% endfor %}",
            ("chat", "image"),
            "template_file",
        ),
    ],
    ids=["audio", "no chats", "our own model", "a template without a place"],
)
def test_parts_that_the_vllm_backend_cannot_be_given_are_refused_at_start(
    tmp_path: Path, template: str, abilities: tuple[TierAbility, ...], key: str
) -> None:
    path = tmp_path / "t"
    path.write_text(template)
    config = TierConfig(name="assistant", can=abilities, template_file=str(path) if template else "")
    with pytest.raises(ConfigError) as raised:
        load_tiers([config])
    assert raised.value.where == f"tiers[0].{key}"


def test_urls_are_of_openais_kind_only(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text("tiers:\n  - name: a\n    upstream: {kind: trtllm, urls: ['http://a:1/v1']}\n")
    with pytest.raises(ConfigError, match=r"gateway\.yaml:3:\d+: tiers\[0\]\.upstream\.urls"):
        load_config(path, Flags())
