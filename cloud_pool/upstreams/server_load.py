"""The load that servers report of themselves, read from their Prometheus metrics.

    vLLM, also in Triton     vllm:num_requests_running, _waiting, kv_cache_usage_perc (before: gpu_cache_usage_perc)
    SGLang                   sglang:num_running_reqs, num_queue_reqs, token_usage, max_total_num_tokens
    llama-server             llamacpp:requests_processing, requests_deferred
    TensorRT-LLM in Triton   nv_trt_llm_request_metrics (scheduled, waiting), nv_trt_llm_kv_cache_block_metrics
    Triton                   nv_inference_pending_request_count

Requests are added up over the models and engines of a server, because they share its processors; the KV use is that of
the fullest engine.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from math import isfinite
from typing import Final
from urllib.parse import urlsplit

import anyio
import msgspec
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from causeway_server.router.serving.http_client import HttpClient, HttpClientError
from causeway_server.router.serving.tls.contexts import TlsContext
from causeway_server.router.serving.upstream.responses import read_body

_MAX_BYTES: Final = 4 * 1024 * 1024
_IDLE_S: Final = 60.0
_REQUESTS: Final = frozenset(
    {
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "sglang:num_running_reqs",
        "sglang:num_queue_reqs",
        "llamacpp:requests_processing",
        "llamacpp:requests_deferred",
        "nv_inference_pending_request_count",
    }
)
_KV_USE: Final = frozenset({"vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"})
_KV_TOKENS: Final = "sglang:max_total_num_tokens"
_VLLM_CACHE: Final = "vllm:cache_config_info"
_TRTLLM_REQUESTS, _TRTLLM_BLOCKS = "nv_trt_llm_request_metrics", "nv_trt_llm_kv_cache_block_metrics"
_NAMES: Final = (*_REQUESTS, *_KV_USE, _KV_TOKENS, _VLLM_CACHE, _TRTLLM_REQUESTS, _TRTLLM_BLOCKS)
log = logging.getLogger(__name__)


class ServerLoad(msgspec.Struct, frozen=True):
    """The load of one server: `requests` of all clients, running and waiting, the share of the KV cache that they need,
    and its room, 0 if not reported.
    """

    requests: int = 0
    kv_use: float = 0.0
    kv_tokens: int = 0


def parse_load(text: str) -> ServerLoad | None:
    """Return the load in a page of metrics; None if it has none of the known ones. Raises ValueError."""
    # The parser takes a few microseconds for each line, and vLLM has thousands of them.
    lines = [line for line in text.splitlines() if line.startswith(_NAMES)]
    samples = [
        sample
        for family in text_string_to_metric_families("\n".join([*lines, ""]))
        for sample in family.samples
        if isfinite(sample.value)
    ]
    if not samples:
        return None
    uses = [value for sample in samples for value in _kv_use(sample)]
    return ServerLoad(
        requests=int(sum(sample.value for sample in samples if _counts_requests(sample))),
        kv_use=min(1.0, max(0.0, *uses, 0.0)),
        kv_tokens=_kv_tokens(samples),
    )


def _counts_requests(sample: Sample) -> bool:
    kind = sample.labels.get("request_type")
    return sample.name in _REQUESTS or (sample.name == _TRTLLM_REQUESTS and kind in ("scheduled", "waiting"))


def _kv_use(sample: Sample) -> Iterator[float]:
    kind = sample.labels.get("kv_cache_block_type")
    if sample.name in _KV_USE or (sample.name == _TRTLLM_BLOCKS and kind == "fraction"):
        yield sample.value


def _kv_tokens(samples: list[Sample]) -> int:
    """Return the room of the KV caches of all engines, in tokens."""
    blocks = {
        sample.labels.get("kv_cache_block_type", ""): sample.value
        for sample in samples
        if sample.name == _TRTLLM_BLOCKS
    }
    tokens = blocks.get("max", 0.0) * blocks.get("tokens_per", 0.0)
    for sample in samples:
        if sample.name == _KV_TOKENS:
            tokens += sample.value
        if sample.name == _VLLM_CACHE:  # "None" before the cache is allocated
            sizes = (sample.labels.get("num_gpu_blocks", ""), sample.labels.get("block_size", ""))
            tokens += int(sizes[0]) * int(sizes[1]) if all(size.isdecimal() for size in sizes) else 0
    return int(tokens)


def metrics_url(address: str, metrics: str) -> str:
    """Return the URL of a server's metrics: a path at `address` (URL or host:port), or `:PORT/path`."""
    server = urlsplit(address if "://" in address else f"http://{address}")
    host = f"[{server.hostname}]" if ":" in (server.hostname or "") else server.hostname
    return f"{server.scheme}://{host}{metrics}" if metrics[0] == ":" else f"{server.scheme}://{server.netloc}{metrics}"


class LoadReader:
    """Reads the loads of a tier's servers, at `metrics` (`metrics_url`), in `timeout_s`. Call `close` when done."""

    def __init__(self, metrics: str, tls: TlsContext | None = None, timeout_s: float = 1.0) -> None:
        self._metrics = metrics
        self._tls = tls
        self._timeout_s = timeout_s
        self._clients: dict[str, HttpClient] = {}
        self._silent: set[str] = set()

    async def read(self, addresses: Collection[str]) -> Mapping[str, ServerLoad]:
        """Return the loads of these servers, without those that report none in time."""
        for address in self._clients.keys() - set(addresses):
            self._clients.pop(address).close()
        self._silent.intersection_update(addresses)
        found: dict[str, ServerLoad] = {}

        async def ask(address: str) -> None:
            reason = "The page has no known metric."
            try:
                if (load := await self._load(address)) is not None:
                    found[address] = load
                    self._silent.discard(address)
                    return
            except (HttpClientError, TimeoutError, ValueError) as error:
                reason = str(error) or type(error).__name__
            if address not in self._silent:
                self._silent.add(address)
                log.warning(
                    "The server at %s does not report its load, so only the requests of this process are counted: %s",
                    address,
                    reason,
                )

        async with anyio.create_task_group() as tasks:
            for address in addresses:
                tasks.start_soon(ask, address)
        return found

    async def _load(self, address: str) -> ServerLoad | None:
        url = metrics_url(address, self._metrics)
        if address not in self._clients:
            self._clients[address] = HttpClient(
                url, tls=self._tls, limit=1, connect_timeout_s=self._timeout_s, idle_s=_IDLE_S
            )
        until = anyio.current_time() + self._timeout_s
        response = await self._clients[address].request("GET", urlsplit(url).path, "Accept: text/plain\r\n", until)
        try:
            if response.status != 200:
                raise ValueError(f"{url} answers {response.status}.")
            body = await read_body(response, _MAX_BYTES)
        finally:
            response.release()
        if body is None:
            raise ValueError(f"{url} answered with more than {_MAX_BYTES} bytes.")
        return parse_load(body.decode())

    def close(self) -> None:
        for client in self._clients.values():
            client.close()
