"""What servers report of their load: the metrics of each kind, and pages that are none, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import cast

import anyio
import pytest
from aiohttp import web

from causeway_server.cloud_pool.dispatch.config import LoadBalancingConfig
from causeway_server.cloud_pool.dispatch.discovery import TierEndpoints, server_address
from causeway_server.cloud_pool.dispatch.pool import Pool
from causeway_server.cloud_pool.upstreams.inference import Upstream
from causeway_server.cloud_pool.upstreams.server_load import LoadReader, ServerLoad, metrics_url, parse_load
from tests.cloud_pool.dispatch.scripted_pool import Endpoint
from tests.waiting import until

VLLM = """
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 4.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="None"} 1.0
vllm:e2e_request_latency_seconds_bucket{engine="0",le="0.3",model_name="m"} 5.0
"""
SGLANG = """
sglang:num_running_reqs{model_name="m"} 7.0
sglang:num_queue_reqs{model_name="m"} 1.0
sglang:token_usage{model_name="m"} 0.28
sglang:max_total_num_tokens{model_name="m"} 454142.0
"""
LLAMA_SERVER = "llamacpp:requests_processing 2\nllamacpp:requests_deferred 46\n"
TRITON_VLLM = """
nv_inference_pending_request_count{model="vllm_model",version="1"} 1
vllm:num_requests_running{model="vllm_model",version="1"} 2
vllm:num_requests_waiting{model="vllm_model",version="1"} 3
vllm:gpu_cache_usage_perc{model="vllm_model",version="1"} 0.5
"""
TRTLLM = """
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="waiting",version="1"} 2
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="scheduled",version="1"} 3
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="max",version="1"} 512
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="tensorrt_llm",version="1"} 0.4
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="tensorrt_llm",version="1"} 64
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="tensorrt_llm",version="1"} 100
"""


@pytest.mark.parametrize(
    ("page", "load"),
    [
        (VLLM, ServerLoad(9, 0.75, 16_000)),
        (SGLANG, ServerLoad(8, 0.28, 454_142)),
        (LLAMA_SERVER, ServerLoad(48)),
        (TRITON_VLLM, ServerLoad(6, 0.5)),
        (TRTLLM, ServerLoad(5, 0.4, 6_400)),
        ("vllm:kv_cache_usage_perc 7\nvllm:num_requests_running 0\n", ServerLoad(0, 1.0)),
        ("vllm:num_requests_running +Inf\nvllm:kv_cache_usage_perc NaN\nvllm:num_requests_waiting 2\n", ServerLoad(2)),
        ("process_cpu_seconds_total 3\n", None),
        ("<html>404</html>", None),
        ("", None),
    ],
    ids=[
        "vllm",
        "sglang",
        "llama-server",
        "vllm-in-triton",
        "trtllm",
        "beyond-1",
        "infinite",
        "others",
        "html",
        "empty",
    ],
)
def test_each_kind_of_server_reports_its_load(page: str, load: ServerLoad | None) -> None:
    assert parse_load(page) == load


@pytest.mark.parametrize("page", ["vllm:num_requests_running{", "vllm:num_requests_running x"])
def test_a_malformed_page_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_load(page)


@pytest.mark.parametrize(
    ("address", "metrics", "url"),
    [
        ("http://vllm:8000/v1", "/metrics", "http://vllm:8000/metrics"),
        ("https://vllm/v1", "/metrics", "https://vllm/metrics"),
        ("https://vllm/v1", ":9000/m", "https://vllm:9000/m"),
        ("triton:8001", ":8002/metrics", "http://triton:8002/metrics"),
        ("[::1]:8001", ":8002/metrics", "http://[::1]:8002/metrics"),
    ],
)
def test_the_metrics_are_at_the_server_itself(address: str, metrics: str, url: str) -> None:
    assert metrics_url(address, metrics) == url


Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def server(answer: Answer) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_get("/metrics", answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


async def page(request: web.Request) -> web.StreamResponse:
    return web.Response(text=SGLANG)


async def stalls(request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    return web.Response()


async def floods(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b"# nothing\n" * 100_000)


async def redirects(request: web.Request) -> web.StreamResponse:
    raise web.HTTPFound("/elsewhere")


async def mumbles(request: web.Request) -> web.StreamResponse:
    return web.Response(body=b"vllm:num_requests_running \xff\n")


@pytest.mark.parametrize("faulty", [stalls, floods, redirects, mumbles], ids=lambda fault: fault.__name__)
async def test_a_server_that_reports_nothing_useful_takes_nothing_from_the_others(
    faulty: Answer, caplog: pytest.LogCaptureFixture
) -> None:
    reader = LoadReader("/metrics", timeout_s=2.0)
    async with server(page) as well, server(faulty) as ill:
        for _ in range(2):
            assert await reader.read([well, ill, "http://127.0.0.1:1/v1"]) == {well: ServerLoad(8, 0.28, 454_142)}
        reader.close()
    warned = [record.getMessage() for record in caplog.records if record.name.endswith("server_load")]
    assert sorted(text.split()[3] for text in warned) == sorted([ill, "http://127.0.0.1:1/v1"]), "each once"


async def test_what_servers_report_steers_a_pool_and_ends_with_them() -> None:
    """An endpoint that others keep busy gets no request, until it reports nothing any more."""
    is_silent = False

    async def busy(request: web.Request) -> web.StreamResponse:
        return web.Response(status=503) if is_silent else web.Response(text=SGLANG)

    async def idle(request: web.Request) -> web.StreamResponse:
        return web.Response(text="sglang:num_running_reqs 0\n")

    async with server(busy) as first, server(idle) as second, anyio.create_task_group() as tasks:
        endpoints = TierEndpoints("large", "m", (server_address(first), server_address(second)))
        settings = LoadBalancingConfig(metrics_interval_s=0.01)
        clients = {address: cast("Upstream", Endpoint()) for address in (first, second)}
        pool = Pool(endpoints, clients.__getitem__, settings=settings, loads=LoadReader("/metrics", timeout_s=2.0))
        tasks.start_soon(pool.watch)
        await until(lambda: pool.endpoints[0].reported is not None)
        assert pool.endpoints[0].others == 8
        leases = [pool.lease() for _ in range(6)]
        assert {lease.endpoint for lease in leases} == {second}
        for lease in leases:
            lease.close()
        is_silent = True
        await until(lambda: pool.endpoints[0].reported is None)
        assert pool.endpoints[0].others == 0
        assert pool.lease(excluding={second}).endpoint == first
        tasks.cancel_scope.cancel()
