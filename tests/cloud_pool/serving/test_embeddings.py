"""Embeddings at the gateway: against scripted servers over real gRPC, and with our engine in a real Triton."""

from __future__ import annotations

import asyncio
import json
import struct
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import msgspec
import pytest
import pytest_asyncio
from tritonclient.grpc import service_pb2

from causeway_server.cloud_pool.accounts.audit import AuditRecord
from causeway_server.cloud_pool.admission import AdmissionController
from causeway_server.cloud_pool.config import Flags, load_config
from causeway_server.cloud_pool.core.request_context import RequestContext
from causeway_server.cloud_pool.degradation.config import DegradationConfig
from causeway_server.cloud_pool.degradation.fallback import TierFallback, TierSignals
from causeway_server.cloud_pool.degradation.tier_attempt import TierRuntime
from causeway_server.cloud_pool.dispatch.discovery import TierEndpoints, parse_endpoint_address
from causeway_server.cloud_pool.dispatch.dispatcher import Dispatcher
from causeway_server.cloud_pool.dispatch.pool import Pool as Endpoints
from causeway_server.cloud_pool.serving.service import Service
from causeway_server.cloud_pool.tiers.config import TierAbility, TierConfig
from causeway_server.cloud_pool.tiers.tier import Tier, load_tiers
from causeway_server.cloud_pool.upstreams.triton.client import TritonClient
from causeway_server.router.errors import CausewayError, CloudFailed, UnsupportedFeature
from causeway_server.router.types import Embeddings, Request
from tests.cloud_pool.upstreams.test_triton_client import PATIENCE_S, Reply, Script, bed
from tests.waiting import until

from ..conftest import TOKEN, Command, Pool

pytestmark = pytest.mark.slow

TEXTS = Request(kind="embedding", model="stock", prompts=("one", "two", (3, 4)))
VECTORS = {'"one"': "[0, 0.5]", '"two"': "[1, 0.5]", "[3,4]": "[2, 0.5]"}


def embedding_input(request: service_pb2.ModelInferRequest) -> object:
    return json.loads(request.raw_input_contents[0][4:])["input"]


def vector(text: str, tokens: int = 5) -> Reply:
    reply = Reply()
    tensors = {
        "text_output": struct.pack("<I", len(text)) + text.encode(),
        "num_input_tokens": struct.pack("<I", tokens),
    }
    for name, raw in tensors.items():
        reply.infer_response.outputs.add(name=name)
        reply.infer_response.raw_output_contents.append(raw)
    return reply


def end() -> Reply:
    reply = Reply()
    reply.infer_response.parameters["triton_final_response"].bool_param = True
    return reply


async def stock(request: service_pb2.ModelInferRequest, context: object) -> AsyncIterator[Reply]:
    """Answer as Triton's vLLM backend does with an embedding model; the end is a response of its own."""
    if "embedding_request" not in [tensor.name for tensor in request.inputs]:
        yield Reply(error_message="Model vllm_embed does not support 'generate' request")
        return
    asked = json.dumps(embedding_input(request), separators=(",", ":"))
    yield vector(VECTORS.get(asked, "[7, 0.5]"))
    yield end()


def tier(*can: TierAbility) -> Tier:
    config = TierConfig(name="stock", model="vllm_embed", template_file="", can=can or ("embedding",))
    return Tier(config, load_tiers(load_config(None, Flags()).tiers)[0].chat_format)


async def embed(
    triton: TritonClient,
    request: Request,
    admission: AdmissionController,
    *,
    embedding_tier: Tier | None = None,
    tenant: str = "",
) -> Embeddings:
    chosen = embedding_tier or tier()
    pool = Endpoints(TierEndpoints("stock", "vllm_embed", (parse_endpoint_address("t:1"),)), lambda _: triton)
    runtime = TierRuntime(chosen, admission, Dispatcher(pool))
    config = DegradationConfig(tiers=("stock", "other"))
    signals = {name: TierSignals(pool, admission.scheduler) for name in ("stock", "other")}
    service = Service({"stock": runtime, "other": runtime}, TierFallback(config, signals))
    context = RequestContext(
        id="r", request=request, tier=chosen, deadline=time.monotonic() + PATIENCE_S, tenant=tenant
    )
    head, embeddings = await service.embed(context)
    assert head.model == "stock"
    return embeddings


# --- a stock vLLM deployment -----------------------------------------------------------------------------------------


async def test_vectors_are_in_the_order_of_the_inputs_and_their_tokens_add_up() -> None:
    admission = AdmissionController(1, 0)
    async with bed(stock) as (fake, triton):
        embeddings = await embed(triton, TEXTS, admission)
    assert embeddings.vectors == ((0.0, 0.5), (1.0, 0.5), (2.0, 0.5))
    assert embeddings.usage.prompt_tokens == 15
    assert [embedding_input(request) for request in fake.requests] == ["one", "two", [3, 4]]
    assert admission.scheduler.running == 0


async def test_the_model_learns_which_texts_are_one_caller_s_and_not_its_name() -> None:
    async with bed(stock) as (fake, triton):
        for tenant in ("acme", "acme", "other"):
            await embed(triton, TEXTS, AdmissionController(1, 0), tenant=tenant)
    callers = [request.parameters["causeway_caller"].string_param for request in fake.requests]
    assert len(set(callers[:6])) == 1
    assert len(set(callers)) == 2
    assert not {"acme", "other"} & set(callers)


@pytest.mark.parametrize("permits", [1, 4])
async def test_a_long_list_has_no_more_inputs_in_triton_than_permits(permits: int) -> None:
    at_once, most = 0, 0

    async def counting(request: service_pb2.ModelInferRequest, context: object) -> AsyncIterator[Reply]:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        replies = [reply async for reply in stock(request, context)]
        yield replies[0]
        await asyncio.sleep(0)
        at_once -= 1  # with the last reply the permit goes on to the next input
        yield replies[1]

    async with bed(counting) as (_, triton):
        long = msgspec.structs.replace(TEXTS, prompts=("one", "two") * 20)
        embeddings = await embed(triton, long, AdmissionController(permits, 0))
    assert embeddings.vectors == ((0.0, 0.5), (1.0, 0.5)) * 20
    assert most <= permits


async def fails_second(request: service_pb2.ModelInferRequest, context: object) -> AsyncIterator[Reply]:
    if embedding_input(request) == "two":
        yield Reply(error_message="context_length_exceeded: too long")
        return
    async for reply in stock(request, context):
        yield reply


async def no_vector(request: object, context: object) -> AsyncIterator[Reply]:
    yield vector("some text")
    yield end()


async def empty_vector(request: object, context: object) -> AsyncIterator[Reply]:
    yield vector("[]")
    yield end()


async def nothing(request: object, context: object) -> AsyncIterator[Reply]:
    yield end()


@pytest.mark.parametrize(
    ("script", "code"),
    [
        (fails_second, "context_length_exceeded"),
        (no_vector, "cloud_failed"),
        (empty_vector, "cloud_failed"),
        (nothing, "cloud_failed"),
    ],
)
async def test_a_failed_input_fails_the_request_and_frees_its_permit(script: Script, code: str) -> None:
    admission = AdmissionController(1, 0)
    async with bed(script) as (_, triton):
        with pytest.raises(CausewayError) as failed:
            await embed(triton, TEXTS, admission)
    assert failed.value.code == code
    assert admission.scheduler.running == 0


async def test_no_other_tier_ever_answers() -> None:
    """Vectors of two models cannot be compared."""

    async def broken(request: object, context: object) -> AsyncIterator[Reply]:
        yield Reply(error_message="the model is broken")

    async with bed(broken) as (fake, triton):
        with pytest.raises(CloudFailed):
            await embed(triton, TEXTS, AdmissionController(1, 0))
    assert {request.model_name for request in fake.requests} == {"vllm_embed"}


async def test_a_cancelled_request_frees_its_permit_and_sends_nothing_more() -> None:
    texts: list[object] = []

    async def silent_second(request: service_pb2.ModelInferRequest, context: object) -> AsyncIterator[Reply]:
        if "embedding_request" in [tensor.name for tensor in request.inputs]:  # else it is asked to stop
            texts.append(embedding_input(request))
            if texts[-1] == "two":
                await asyncio.Event().wait()
        async for reply in stock(request, context):
            yield reply

    admission = AdmissionController(1, 0)
    async with bed(silent_second) as (fake, triton):
        task = asyncio.ensure_future(embed(triton, TEXTS, admission))
        while len(texts) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert admission.scheduler.running == 0
        await fake.cancelled.wait()
        assert texts == ["one", "two"]


@pytest.mark.parametrize("dimensions", [1, 3, 1024])
async def test_another_number_of_dimensions_is_refused(dimensions: int) -> None:
    async with bed(stock) as (_, triton):
        with pytest.raises(UnsupportedFeature, match="2 dimensions"):
            await embed(triton, msgspec.structs.replace(TEXTS, dimensions=dimensions), AdmissionController(1, 0))


async def test_a_tier_that_makes_no_vectors_sends_nothing() -> None:
    async with bed(stock) as (fake, triton):
        with pytest.raises(UnsupportedFeature, match="chats and completions"):
            await embed(triton, TEXTS, AdmissionController(1, 0), embedding_tier=tier("chat", "completion"))
    assert fake.requests == []


@pytest.mark.parametrize(("only_embeds", "code"), [(True, ""), (False, "cloud_failed")])
async def test_a_model_that_only_makes_vectors_is_probed_by_one(only_embeds: bool, code: str) -> None:
    async with bed(stock) as (fake, triton):
        address = parse_endpoint_address("t:1")
        pool = Endpoints(TierEndpoints("stock", "vllm_embed", (address,), only_embeds=only_embeds), lambda _: triton)
        assert await pool.check() == {"t:1": code}
    assert len(fake.requests) == 1


def test_a_tier_of_embeddings_alone_needs_no_template(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text("tiers: [{name: bge-m3, can: [embedding]}, {name: assistant-large}]")
    embeds, answers = load_tiers(load_config(path, Flags()).tiers)
    assert (embeds.only_embeds, answers.only_embeds) == (True, False)
    with pytest.raises(UnsupportedFeature, match="for embeddings, not for chats"):
        embeds.prompts(Request(kind="chat", model="bge-m3"))


# --- our engine in Triton --------------------------------------------------------------------------------------------

CONFIG = """
server: {port: 0, token_file: tokens, readiness_cache_s: 0}
audit_file: audit.jsonl
tiers:
  - {name: assistant-large, can: [chat, completion, embedding]}
  - {name: vectors, model: assistant-large, artifact: assistant-large, can: [embedding]}
tenants:
  prices: [{tier: vectors, input: 2000, output: 50000}]
  default: {tokens_per_minute: 2000}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("embeddings")


@pytest.fixture(scope="module")
def embedding_gateway(pool: Pool, folder: Path) -> Iterator[str]:
    (folder / "tokens").write_text(f"kiosk {TOKEN}\n")
    (folder / "gateway.yaml").write_text(CONFIG)
    command = Command("serve", "--config", str(folder / "gateway.yaml"), "--triton", pool.grpc)
    try:
        yield command.ready()["url"].removesuffix("/v1")
        assert command.stop() == 0
    finally:
        command.process.kill()


@pytest_asyncio.fixture
async def http(embedding_gateway: str) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(
        headers={"authorization": f"Bearer {TOKEN}"}, base_url=embedding_gateway
    ) as session:
        yield session


async def records(folder: Path, request_id: str) -> list[AuditRecord]:
    """The audit records of one request, once there is one."""
    found: list[AuditRecord] = []

    def written() -> bool:
        lines = (folder / "audit.jsonl").read_bytes().splitlines() if (folder / "audit.jsonl").exists() else []
        found[:] = [one for line in lines if (one := msgspec.json.decode(line, type=AuditRecord)).id == request_id]
        return bool(found)

    await until(written)
    return found


@pytest.mark.triton
@pytest.mark.engine
async def test_tokens_are_billed_and_audited(http: aiohttp.ClientSession, folder: Path) -> None:
    body = {"model": "vectors", "input": ["wake me up", "play jazz"]}
    async with http.post("/v1/embeddings", json=body, headers={"x-request-id": "bill-1"}) as reply:
        assert reply.status == 200
        tokens = (await reply.json())["usage"]["prompt_tokens"]
    (record,) = await records(folder, "bill-1")
    assert (record.route, record.tier, record.outcome, record.device) == ("embedding", "vectors", "ok", "kiosk")
    assert (record.prompt_tokens, record.completion_tokens) == (tokens, 0)
    assert record.pico_usd == tokens * 2 * 10**9
    assert b"wake me up" not in (folder / "audit.jsonl").read_bytes()


@pytest.mark.triton
@pytest.mark.engine
async def test_a_refused_request_is_audited_and_free(http: aiohttp.ClientSession, folder: Path) -> None:
    body = {"model": "vectors", "input": "a", "dimensions": 3}
    async with http.post("/v1/embeddings", json=body, headers={"x-request-id": "bill-2"}) as reply:
        assert reply.status == 400
    (record,) = await records(folder, "bill-2")
    assert (record.outcome, record.pico_usd) == ("unsupported_feature", 0)


@pytest.mark.triton
@pytest.mark.engine
async def test_a_tier_of_embeddings_is_ready_and_refuses_chats(http: aiohttp.ClientSession) -> None:
    async with http.get("/readyz") as reply:
        assert reply.status == 200
    body = {"model": "vectors", "messages": [{"role": "user", "content": "hi"}]}
    async with http.post("/v1/chat/completions", json=body) as reply:
        error = (await reply.json())["error"]
    assert (reply.status, error["code"], error["param"]) == (400, "unsupported_feature", "model")


@pytest.mark.triton
@pytest.mark.engine
async def test_a_deadline_ends_a_list(http: aiohttp.ClientSession, pool: Pool) -> None:
    body = {"model": "assistant-large", "input": [[5] * 500] * 3}
    async with http.post("/v1/embeddings", json=body, headers={"x-causeway-deadline-ms": "1"}) as reply:
        assert reply.status == 504
    await until(pool.is_idle)


@pytest.mark.triton
@pytest.mark.engine
async def test_rates_count_prompt_tokens(http: aiohttp.ClientSession) -> None:
    """The limit is on tokens in a minute; nothing is reserved for an answer."""
    statuses = []
    for _ in range(12):
        async with http.post("/v1/embeddings", json={"model": "vectors", "input": [[5] * 300]}) as reply:
            statuses.append(reply.status)
            if reply.status == 429:
                assert int(reply.headers["retry-after"]) >= 1
    assert statuses[0] == 200
    assert statuses[-1] == 429
