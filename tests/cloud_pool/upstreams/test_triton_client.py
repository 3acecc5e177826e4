"""The Triton client against scripted servers, over real gRPC."""

from __future__ import annotations

import asyncio
import inspect
import struct
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from types import SimpleNamespace
from typing import TypeAlias, cast

import anyio
import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from causeway_server.cloud_pool.admission import AdmissionController
from causeway_server.cloud_pool.cache.caching_service import CachingService
from causeway_server.cloud_pool.cache.shared_cache import SharedCache
from causeway_server.cloud_pool.core.request_context import RequestContext
from causeway_server.cloud_pool.degradation.config import DegradationConfig
from causeway_server.cloud_pool.degradation.fallback import TierFallback, TierSignals
from causeway_server.cloud_pool.degradation.tier_attempt import TierRuntime
from causeway_server.cloud_pool.dispatch.discovery import TierEndpoints, parse_endpoint_address
from causeway_server.cloud_pool.dispatch.dispatcher import Dispatcher
from causeway_server.cloud_pool.dispatch.pool import Pool
from causeway_server.cloud_pool.serving.service import Service
from causeway_server.cloud_pool.tiers.config import TierConfig
from causeway_server.cloud_pool.tiers.tier import ChatFormat, Tier
from causeway_server.cloud_pool.upstreams.inference import Delta, InferenceRequest, Upstream
from causeway_server.cloud_pool.upstreams.triton.client import TritonClient
from causeway_server.cloud_pool.upstreams.triton.messages import SamplingParameters
from causeway_server.cloud_pool.upstreams.triton.tensors import VllmTensors
from causeway_server.router.errors import CausewayError, CloudFailed, CloudRejected, DeadlineExceeded, StreamBroken
from causeway_server.router.types import Chunk, Message, Request

Reply: TypeAlias = service_pb2.ModelStreamInferResponse
Script = Callable[[service_pb2.ModelInferRequest, grpc.aio.ServicerContext], AsyncIterator[Reply]]
PATIENCE_S = 60.0


def piece(text: str = "", reason: str = "None", *, tokens: int = 1, inputs: int = 5, final: bool = False) -> Reply:
    """A response in the vLLM backend's form, which repeats the prompt's length each time."""
    reply = Reply()
    made = {
        "text_output": struct.pack("<I", len(text.encode())) + text.encode(),
        "finish_reason": struct.pack("<I", len(reason)) + reason.encode(),
        "num_output_tokens": struct.pack("<I", tokens),
        "num_input_tokens": struct.pack("<I", inputs),
    }
    for name, raw in made.items():
        reply.infer_response.outputs.add(name=name)
        reply.infer_response.raw_output_contents.append(raw)
    reply.infer_response.parameters["triton_final_response"].bool_param = final
    return reply


class FakeTriton(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]  # untyped package
    """Plays `script` for each call; records requests and cancellations."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.address = ""
        self.requests: list[service_pb2.ModelInferRequest] = []
        self.metadata: list[dict[str, str]] = []
        self.cancelled = asyncio.Event()
        self.control: list[str] = []
        self.may_control = True
        self.load_faults = 0
        self.index_reads = 0
        self.state = "READY"
        self.loading = asyncio.Event()  # a load lasts until it is set
        self.loading.set()

    async def ModelStreamInfer(
        self, requests: AsyncIterator[service_pb2.ModelInferRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[Reply]:
        self.metadata.append({str(key): str(value) for key, value in context.invocation_metadata() or ()})
        async for request in requests:
            self.requests.append(request)
            try:
                async for reply in self.script(request, context):
                    yield reply
            except asyncio.CancelledError:
                self.cancelled.set()
                raise

    async def RepositoryModelUnload(self, request: object, context: grpc.aio.ServicerContext) -> object:
        if not self.may_control:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "explicit model load / unload is not allowed")
        self.control.append("unload")
        self.state = "UNAVAILABLE"
        return service_pb2.RepositoryModelUnloadResponse()

    async def RepositoryModelLoad(self, request: object, context: grpc.aio.ServicerContext) -> object:
        self.control.append("load")
        if self.load_faults:
            self.load_faults -= 1
            await context.abort(grpc.StatusCode.INTERNAL, "failed to load 'm', no memory")
        self.state = "LOADING"
        await self.loading.wait()
        self.state = "READY"
        return service_pb2.RepositoryModelLoadResponse()

    async def RepositoryIndex(self, request: object, context: object) -> object:
        self.index_reads += 1
        return service_pb2.RepositoryIndexResponse(
            models=[service_pb2.RepositoryIndexResponse.ModelIndex(name="m", version="1", state=self.state)]
        )


@asynccontextmanager
async def bed(script: Script, *, stop_s: float = PATIENCE_S) -> AsyncIterator[tuple[FakeTriton, TritonClient]]:
    fake = FakeTriton(script)
    server = grpc.aio.server()
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(fake, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with anyio.create_task_group() as tasks:
            fake.address = f"127.0.0.1:{port}"
            triton = TritonClient(fake.address, tasks, pauses_s=(0.01, 0.01), tensors=VllmTensors(stop_s))
            with anyio.fail_after(PATIENCE_S):
                yield fake, triton
            tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await triton.close()
    finally:
        await server.stop(None)


def infer_request(seconds: float = PATIENCE_S, traceparent: str = "") -> InferenceRequest:
    return InferenceRequest(
        model="m",
        prompt="p",
        parameters=SamplingParameters(max_tokens=4),
        deadline=time.monotonic() + seconds,
        request_id="r-1",
        traceparent=traceparent,
    )


async def collect(triton: Upstream, request: InferenceRequest) -> list[Delta]:
    async with aclosing(triton.generate(request)) as deltas:
        return [delta async for delta in deltas]


async def two_pieces(request: object, context: object) -> AsyncIterator[Reply]:
    yield piece("a")
    yield piece("b", "stop", final=True)


async def hang_after_one(request: object, context: object) -> AsyncIterator[Reply]:
    yield piece("a")
    await asyncio.Event().wait()


async def test_trace_id_and_deadline_reach_triton() -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with bed(two_pieces) as (fake, triton):
        deltas = await collect(triton, infer_request(traceparent=trace))
    assert "".join(delta.text for delta in deltas) == "ab"
    assert fake.metadata[0]["traceparent"] == trace
    assert fake.requests[0].id == "r-1"
    assert 0 < fake.requests[0].parameters["causeway_deadline_ms"].int64_param <= PATIENCE_S * 1000


async def ends_early(request: object, context: object) -> AsyncIterator[Reply]:
    yield piece("a")


async def drops(request: object, context: grpc.aio.ServicerContext) -> AsyncIterator[Reply]:
    yield piece("a")
    await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")


async def rejects(request: object, context: object) -> AsyncIterator[Reply]:
    yield Reply(error_message="[request id: r-1] inference input 'text_input' data-type is 'FP32'")


async def raises(request: object, context: grpc.aio.ServicerContext) -> AsyncIterator[Reply]:
    yield piece("a")
    await context.abort(grpc.StatusCode.INTERNAL, "Failed to process the request(s): KeyError")


async def garbage(request: object, context: object) -> AsyncIterator[Reply]:
    reply = piece("a")
    reply.infer_response.raw_output_contents[0] = b"\xff\xff\xff\xff"
    yield reply


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        (ends_early, StreamBroken),
        (drops, StreamBroken),
        (rejects, CloudRejected),
        (raises, CloudFailed),
        (garbage, CloudFailed),
    ],
)
async def test_stream_without_its_end_is_an_error(script: Script, kind: type[CausewayError]) -> None:
    async with bed(script) as (_, triton):
        with pytest.raises(kind):
            await collect(triton, infer_request())


async def test_deadline_ends_the_call_here_and_in_triton() -> None:
    async with bed(hang_after_one) as (fake, triton):
        with pytest.raises(DeadlineExceeded):
            await collect(triton, infer_request(seconds=0.2))
        await fake.cancelled.wait()


@pytest.mark.parametrize("how", ["close", "cancel"])
async def test_closing_or_cancelling_the_generator_cancels_the_call(how: str) -> None:
    async with bed(hang_after_one) as (fake, triton):
        if how == "close":
            async with aclosing(triton.generate(infer_request())) as deltas:
                await anext(deltas)
        else:
            began = asyncio.Event()
            task = asyncio.ensure_future(_read_forever(triton, began))
            await began.wait()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert task.cancelled()
        await fake.cancelled.wait()


async def _read_forever(triton: TritonClient, began: asyncio.Event) -> None:
    async with aclosing(triton.generate(infer_request())) as deltas:
        async for _ in deltas:
            began.set()


class StoppableModel:
    """A model that can be asked to stop a call by its name. `obeys` False: it ignores the request."""

    def __init__(self, *, obeys: bool = True) -> None:
        self.stop_requests: list[str] = []
        self.ended: list[str] = []
        self._obeys = obeys
        self._stops: dict[str, asyncio.Event] = {}

    async def __call__(self, request: service_pb2.ModelInferRequest, context: object) -> AsyncIterator[Reply]:
        if [tensor.name for tensor in request.inputs] == ["cancel"]:
            name = request.raw_input_contents[0][4:].decode()
            self.stop_requests.append(name)
            if self._obeys:
                self._stops[name].set()
            return
        name = request.parameters["causeway_call"].string_param
        stop = self._stops[name] = asyncio.Event()
        yield piece("a")
        await stop.wait()
        self.ended.append(name)
        yield Reply(error_message="client_gone: the request was cancelled")


async def leave_after_one(triton: TritonClient) -> None:
    async with aclosing(triton.generate(infer_request())) as deltas:
        await anext(deltas)


async def test_call_with_responses_is_stopped_by_its_name() -> None:
    """Names are unique. The call itself is not cancelled, because that may crash Triton."""
    model = StoppableModel()
    async with bed(model) as (fake, triton):
        for _ in range(2):
            await leave_after_one(triton)
        while len(model.ended) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert sorted(model.stop_requests) == sorted(model.ended)
        assert len(set(model.stop_requests)) == 2
        assert not fake.cancelled.is_set()


async def test_expired_call_is_stopped_and_not_cancelled() -> None:
    """At its deadline the model sends an error itself, which a cancellation must not meet."""
    model = StoppableModel()
    async with bed(model) as (fake, triton):
        with pytest.raises(DeadlineExceeded):
            await collect(triton, infer_request(seconds=0.2))
        while not model.ended:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert not fake.cancelled.is_set()


async def test_call_that_does_not_stop_is_cancelled() -> None:
    model = StoppableModel(obeys=False)
    async with bed(model, stop_s=0.05) as (fake, triton):
        await leave_after_one(triton)
        await fake.cancelled.wait()
        assert len(model.stop_requests) == 1


async def test_model_that_cannot_stop_calls_is_asked_once() -> None:
    """It refuses the tensor; its later calls are cancelled at once."""

    async def refuses(request: service_pb2.ModelInferRequest, context: object) -> AsyncIterator[Reply]:
        if request.inputs[0].name == "cancel":
            yield Reply(error_message="unexpected inference input 'cancel' for model 'm'")
            return
        yield piece("a")
        await asyncio.Event().wait()

    async with bed(refuses) as (fake, triton):
        for _ in range(2):
            fake.cancelled.clear()
            await leave_after_one(triton)
            await fake.cancelled.wait()
        assert [request.inputs[0].name for request in fake.requests] == ["text_input", "cancel", "text_input"]


async def test_unavailable_model_is_asked_to_stop_again() -> None:

    async def away(request: service_pb2.ModelInferRequest, context: object) -> AsyncIterator[Reply]:
        if request.inputs[0].name == "cancel":
            yield Reply(error_message="Request for unknown model: 'm' has no available versions")
            return
        yield piece("a")
        await asyncio.Event().wait()

    async with bed(away) as (fake, triton):
        for _ in range(2):
            fake.cancelled.clear()
            await leave_after_one(triton)
            await fake.cancelled.wait()
        assert [request.inputs[0].name for request in fake.requests] == ["text_input", "cancel"] * 2


async def test_call_without_a_response_is_cancelled() -> None:
    """Triton survives that, and the model need not be asked."""

    async def silent(request: object, context: object) -> AsyncIterator[Reply]:
        await asyncio.Event().wait()
        yield piece("a")

    async with bed(silent) as (fake, triton):
        task = asyncio.ensure_future(collect(triton, infer_request()))
        while not fake.requests:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await fake.cancelled.wait()
        assert len(fake.requests) == 1


# --- a stock vLLM deployment ------------------------------------------------------------------------------------------


def tier() -> Tier:
    chat_format = ChatFormat("{% for m in messages %}<|u|>{{ m.content }}{% endfor %}", special=("<|u|>",))
    return Tier(TierConfig(name="stock", model="vllm_model", template_file="x", max_tokens=77), chat_format)


def service_of(
    triton: TritonClient, request: Request, admission: AdmissionController
) -> tuple[Service, RequestContext]:
    """Return a service over one endpoint, and a request for it."""
    pool = Pool(TierEndpoints("stock", "vllm_model", (parse_endpoint_address("t:1"),)), lambda _: triton)
    runtime = TierRuntime(tier(), admission, Dispatcher(pool))
    service = Service(
        {"stock": runtime}, TierFallback(DegradationConfig(), {"stock": TierSignals(pool, admission.scheduler)})
    )
    context = RequestContext(id="r", request=request, tier=tier(), deadline=time.monotonic() + PATIENCE_S)
    return service, context


@asynccontextmanager
async def answering(
    triton: TritonClient, request: Request, admission: AdmissionController
) -> AsyncIterator[AsyncIterator[Chunk]]:
    """The chunks of a service's answer, to be read one by one."""
    service, context = service_of(triton, request, admission)
    async with aclosing(service.answer(context)) as pieces:
        yield (piece async for piece in pieces if isinstance(piece, Chunk))


async def answer(triton: TritonClient, request: Request, admission: AdmissionController) -> list[Chunk]:
    async with answering(triton, request, admission) as chunks:
        return [chunk async for chunk in chunks]


CHAT = Request(kind="chat", model="stock", messages=(Message("user", "hi <|u|>"),))


async def test_stock_backend() -> None:
    """The repeated prompt length counts once; the model's own name and a limit are sent."""
    admission = AdmissionController(1, 0)
    async with bed(two_pieces) as (fake, triton):
        chunks = await answer(triton, CHAT, admission)
    assert "".join(chunk.text for chunk in chunks) == "ab"
    assert chunks[-1].usage is not None
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (5, 2)
    assert fake.requests[0].model_name == "vllm_model"
    sent = dict(
        zip((tensor.name for tensor in fake.requests[0].inputs), fake.requests[0].raw_input_contents, strict=True)
    )
    assert sent["text_input"][4:] == b"<|u|>hi < |u|>"
    assert b'"max_tokens":77' in sent["sampling_parameters"]
    assert admission.scheduler.running == 0


def generators_here() -> int:
    """Return how many async generators of the gateway are resumed to get here."""
    count, frame = 0, inspect.currentframe()
    while frame is not None:
        ours = "cloud_pool" in frame.f_code.co_filename
        count += ours and bool(frame.f_code.co_flags & inspect.CO_ASYNC_GENERATOR)
        frame = frame.f_back
    return count


@pytest.mark.parametrize(("cached", "most"), [(False, 3), (True, 4)])
async def test_a_token_passes_few_generators(cached: bool, most: int) -> None:
    """Each one costs a resumption a token: the client's, the dispatcher's, the service's; then the shared cache's."""
    counts: list[int] = []

    def clock() -> float:
        counts.append(generators_here())
        return time.monotonic()

    cache = SimpleNamespace(key=lambda *_: None, metrics=SimpleNamespace(answered=lambda _: None)) if cached else None
    async with bed(two_pieces) as (_, triton):
        vars(triton)["_clock"] = clock
        service, context = service_of(triton, CHAT, AdmissionController(1, 0))
        _reply, pieces = CachingService(cast("SharedCache", cache), service.answer).reply(context)
        async with aclosing(pieces):
            assert [piece async for piece in pieces]
    assert max(counts) == most


async def aborted(request: object, context: object) -> AsyncIterator[Reply]:
    yield piece("a", "abort", final=True)


async def fails_second(request: service_pb2.ModelInferRequest, context: object) -> AsyncIterator[Reply]:
    if request.raw_input_contents[0][4:] == b"two":
        yield Reply(error_message="no")
        return
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("script", "request_"),
    [
        (aborted, CHAT),
        (raises, CHAT),
        (fails_second, Request(kind="completion", model="stock", prompts=("one", "two"))),
    ],
)
async def test_failed_answer_releases_its_permit(script: Script, request_: Request) -> None:
    """An abort, an error, and one failing prompt of several."""
    admission = AdmissionController(2, 0)
    async with bed(script) as (_, triton):
        with pytest.raises(CausewayError):
            await answer(triton, request_, admission)
    assert admission.scheduler.running == 0


async def test_cancelled_answer_releases_its_permits_and_all_its_calls() -> None:
    admission = AdmissionController(2, 0)
    both = Request(kind="completion", model="stock", prompts=("one", "two"))
    async with bed(hang_after_one) as (fake, triton):
        task = asyncio.ensure_future(answer(triton, both, admission))
        while len(fake.requests) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        await fake.cancelled.wait()
    assert admission.scheduler.running == 0
