"""What edge and gateway add to the first token of a direct call to Triton; and the cost of a streamed token.

Triton, gateway and edge run as the commands that users start. Requests go over the three paths in turn, so that other
work on the machine disturbs all of them alike. Triton has a core of its own, as it has a machine of its own in
production; otherwise its later tokens take the core on which the first one travels. One row shows the same without
pinning.

Each request has words that no request before it had, as users' requests have: the engine keeps the prompts of
its last requests, and a prompt asked again costs it next to nothing. One row shows the same with one prompt throughout.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import msgspec
import numpy as np
import psutil
import tritonclient.grpc.aio as tritonclient

from causeway_server.models.catalog.artifact import find_artifact
from causeway_server.models.catalog.gguf import read_gguf
from causeway_train.data.prompt_renderer import PromptRenderer

from .rows import Row

ROOT = Path(__file__).parents[2]
MODEL = "assistant-large"
TEXT = "wake me up at seven"
SAMPLING = {"max_tokens": 8, "temperature": 0.2, "ignore_eos": True}  # not 0: the edge would answer from its cache
ROUNDS, WARM_UP = 300, 30
LONG_TOKENS, LONG_ROUNDS, PARALLEL = 400, 10, 16
# The control tokens of our own models have the first ids. Without them every token has a text, and so an event.
ONLY_TEXT = {"logit_bias": {str(token): -100 for token in range(8)}}
FIRST = b'"delta":{"content":'  # the event before it has the role only
RATIO = "time added to the first token ÷ the time of a direct call to Triton"
WORDS = {
    "direct": "direct call",
    "socket": "gateway over a plain socket",
    "gateway": "gateway",
    "edge": "edge and gateway",
}
_COMPLETION_TOKENS = re.compile(rb'"completion_tokens":(\d+)')

Ask = Callable[[str], Awaitable[float]]  # the user's text → seconds to the first token


class Bed(msgspec.Struct, frozen=True):
    triton: str  # host:port of its gRPC
    gateway: str  # URLs that end in /v1
    edge: str
    gateway_pid: int


def main() -> list[Row]:
    with _bed() as bed:
        unpinned = asyncio.run(_measure(bed, judged=False))
        with _triton_apart():
            return [*asyncio.run(_measure(bed, judged=True)), _renamed(unpinned[0])]


def _renamed(row: Row) -> Row:
    return msgspec.structs.replace(row, name=f"    edge and gateway, processes not pinned to cores: {RATIO}")


@contextlib.contextmanager
def _triton_apart() -> Iterator[None]:
    """Pin Triton to the first core and everything else to the others; do nothing on a machine with one core."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        yield
        return
    _place(set(cores[1:]), triton={cores[0]})
    try:
        yield
    finally:
        _place(set(cores), triton=set(cores))


def _place(cores: set[int], *, triton: set[int]) -> None:
    os.sched_setaffinity(0, cores)
    for child in psutil.Process().children():
        own = triton if "triton" in child.cmdline() else cores
        for process in (child, *child.children(recursive=True)):
            for thread in process.threads():
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(thread.id, own)


async def _measure(bed: Bed, *, judged: bool) -> list[Row]:
    triton = tritonclient.InferenceServerClient(bed.triton)
    async with aiohttp.ClientSession() as http, _socket(bed.gateway) as over_socket:
        ways: dict[str, Ask] = {
            "direct": lambda text: _direct(triton, text),
            "socket": over_socket,
            "gateway": lambda text: _over_http(http, bed.gateway, MODEL, text),
            "edge": lambda text: _over_http(http, bed.edge, "large", text),
        }
        ms = await _first_token_ms(ways, _new_texts())
        again_ms = await _first_token_ms(ways, itertools.repeat(TEXT)) if judged else None
        tokens = await _token_costs(triton, http, bed)
        per_core = await _per_core(http, bed)
    await triton.close()
    again = (
        [_added(f"    edge and gateway, the same prompt in each request: {RATIO}", again_ms, "edge")]
        if again_ms
        else []
    )
    return [
        _added(f"edge and gateway: {RATIO}", ms, "edge", 0.7 if judged else None),
        _added(f"    gateway alone: {RATIO}", ms, "gateway", 0.35 if judged else None),
        _added(f"    gateway alone, asked without an HTTP library: {RATIO}", ms, "socket", 0.35 if judged else None),
        *again,
        Row(
            "    time between two streamed tokens: the gateway's ÷ that of a direct call",
            tokens.interval_us / tokens.direct_interval_us,
            "x",
            1.12 if judged else None,
            note=f"gateway {tokens.interval_us:.0f} us, direct call {tokens.direct_interval_us:.0f} us; "
            f"streams of {LONG_TOKENS} tokens",
        ),
        Row(
            "    CPU time per streamed token: the gateway's ÷ a direct client's",
            tokens.cpu_us / tokens.direct_cpu_us,
            "x",
            note=f"gateway {tokens.cpu_us:.0f} us, direct client {tokens.direct_cpu_us:.0f} us",
        ),
        Row(
            "    requests for each second of the gateway's CPU time",
            per_core,
            "/s",
            better="higher",
            note=f"streams of {SAMPLING['max_tokens']} tokens, {PARALLEL} at once",
        ),
    ]


def _added(what: str, ms: Mapping[str, float], way: str, limit: float | None = None) -> Row:
    behind = ", ".join(f"{WORDS[name]} {value:.2f} ms" for name, value in ms.items())
    note = f"time to the first token: {behind}"
    return Row(what, (ms[way] - ms["direct"]) / ms["direct"], "x", limit, note=note)


def _new_texts() -> Iterator[str]:
    """Each begins with a number of its own, so that its prompt shares no more than the template with another's."""
    return (f"{minutes} minutes on the timer" for minutes in itertools.count(11))


async def _first_token_ms(ways: Mapping[str, Ask], texts: Iterator[str]) -> dict[str, float]:
    """Each way's p50."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(WARM_UP + ROUNDS):
        for name, ask in ways.items():
            took = await ask(next(texts))
            if number >= WARM_UP:
                seconds[name].append(took)
    return {name: 1000.0 * statistics.median(taken) for name, taken in seconds.items()}


class TokenCosts(msgspec.Struct, frozen=True):
    """Of one more streamed token, in µs: CPU time of the gateway and of a direct client; time between two tokens."""

    cpu_us: float
    direct_cpu_us: float
    interval_us: float
    direct_interval_us: float


async def _token_costs(triton: tritonclient.InferenceServerClient, http: aiohttp.ClientSession, bed: Bed) -> TokenCosts:
    """The difference of a long and a short stream, so that the cost per request cancels. The two paths take turns.

    Tokens are counted, not events: an event holds several tokens where a draft was right.
    """
    usage = {"stream_options": {"include_usage": True}}

    async def gateway(tokens: int) -> int:
        return (await _stream(http, bed.gateway, MODEL, {"max_tokens": tokens, **ONLY_TEXT, **usage})).tokens

    async def direct(tokens: int) -> int:
        return (await _direct_stream(triton, {"max_tokens": tokens, **ONLY_TEXT})).tokens

    ways = {"gateway": (gateway, psutil.Process(bed.gateway_pid)), "direct": (direct, psutil.Process())}
    cpu_s: dict[tuple[str, int], float] = dict.fromkeys(((way, n) for way in ways for n in (8, LONG_TOKENS)), 0.0)
    answered = dict.fromkeys(cpu_s, 0)
    wall_s: dict[tuple[str, int], list[float]] = {key: [] for key in cpu_s}
    for _ in range(LONG_ROUNDS):
        for way, tokens in cpu_s:
            ask, process = ways[way]
            before, started = process.cpu_times(), time.perf_counter()
            answered[way, tokens] += await ask(tokens)
            wall_s[way, tokens].append(time.perf_counter() - started)
            after = process.cpu_times()
            cpu_s[way, tokens] += after.user + after.system - before.user - before.system

    def cpu_us(way: str) -> float:
        more = answered[way, LONG_TOKENS] - answered[way, 8]
        return 1e6 * (cpu_s[way, LONG_TOKENS] - cpu_s[way, 8]) / more

    def interval_us(way: str) -> float:
        more_s = statistics.median(wall_s[way, LONG_TOKENS]) - statistics.median(wall_s[way, 8])
        return 1e6 * more_s * LONG_ROUNDS / (answered[way, LONG_TOKENS] - answered[way, 8])

    return TokenCosts(cpu_us("gateway"), cpu_us("direct"), interval_us("gateway"), interval_us("direct"))


async def _per_core(http: aiohttp.ClientSession, bed: Bed) -> float:
    """Requests for each second of the gateway's CPU time."""
    process = psutil.Process(bed.gateway_pid)
    before = process.cpu_times()
    for _ in range(LONG_ROUNDS):
        await asyncio.gather(*(_stream(http, bed.gateway, MODEL) for _ in range(PARALLEL)))
    after = process.cpu_times()
    return LONG_ROUNDS * PARALLEL / (after.user + after.system - before.user - before.system)


async def _direct(triton: tritonclient.InferenceServerClient, text: str) -> float:
    """Seconds to the first token, over tritonclient's gRPC stream."""
    return (await _direct_stream(triton, {}, text)).first_s


async def _direct_stream(
    triton: tritonclient.InferenceServerClient, more: Mapping[str, object], text: str = TEXT
) -> Streamed:
    held = {"guided_decoding": msgspec.json.encode({"copy_source": text}).decode()}  # as the gateway asks for it
    started = time.perf_counter()
    first_s, tokens = 0.0, 0
    async for result, error in triton.stream_infer(_inputs({**SAMPLING, **more, **held}, text)):
        if error is not None:
            raise error
        tokens += int(result.as_numpy("num_output_tokens")[0])
        if result.as_numpy("text_output")[0]:
            first_s = first_s or time.perf_counter() - started
    return Streamed(first_s, tokens)


@cache
def _renderer() -> PromptRenderer:
    template = read_gguf(find_artifact(MODEL).path).chat_template
    assert template is not None
    return PromptRenderer(template)


async def _inputs(sampling: Mapping[str, object], text: str) -> AsyncIterator[dict[str, object]]:
    """What the gateway sends too: a prompt by the model's own chat template."""
    texts = {"text_input": _renderer().user(text).encode(), "sampling_parameters": msgspec.json.encode(sampling)}
    made = []
    for name, value in texts.items():
        made.append(tritonclient.InferInput(name, [1], "BYTES"))
        made[-1].set_data_from_numpy(np.array([value], dtype=np.object_))
    for name in ("stream", "exclude_input_in_output", "return_num_output_tokens"):
        made.append(tritonclient.InferInput(name, [1], "BOOL"))
        made[-1].set_data_from_numpy(np.array([True]))
    yield {"model_name": MODEL, "inputs": made}


class Streamed(msgspec.Struct, frozen=True):
    first_s: float
    tokens: int  # 0: the gateway was not asked for usage


async def _over_http(http: aiohttp.ClientSession, url: str, model: str, text: str) -> float:
    """Seconds to the first token, as OpenAI's clients see it."""
    return (await _stream(http, url, model, {}, text)).first_s


@contextlib.asynccontextmanager
async def _socket(url: str) -> AsyncIterator[Ask]:
    """Asks without an HTTP client, whose own work is no small part of what it sees: seconds to the first token."""
    at = urlsplit(url)
    head = f"POST {at.path}/chat/completions HTTP/1.1\r\nhost: {at.netloc}\r\ncontent-type: application/json\r\n"
    reader, writer = await asyncio.open_connection(at.hostname, at.port)

    async def ask(text: str) -> float:
        body = _body(MODEL, text)
        request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
        started = time.perf_counter()
        first_s, seen = 0.0, b""
        writer.write(request)
        while not seen.endswith(b"\r\n0\r\n\r\n"):
            if not (piece := await reader.read(64 * 1024)):
                raise RuntimeError(f"{url}: {seen[-500:]!r}")
            seen += piece
            if not first_s and FIRST in seen:
                first_s = time.perf_counter() - started
        if b"data: [DONE]" not in seen:
            raise RuntimeError(f"{url}: {seen[-500:]!r}")
        return first_s

    try:
        yield ask
    finally:
        writer.close()


def _body(model: str, text: str, more: Mapping[str, object] | None = None) -> bytes:
    ask = {"model": model, "messages": [{"role": "user", "content": text}], "stream": True, **SAMPLING, **(more or {})}
    return msgspec.json.encode(ask)


async def _stream(
    http: aiohttp.ClientSession, url: str, model: str, more: Mapping[str, object] | None = None, text: str = TEXT
) -> Streamed:
    body = _body(model, text, more)
    headers = {"content-type": "application/json"}
    started = time.perf_counter()
    first_s, seen = 0.0, b""
    async with http.post(f"{url}/chat/completions", data=body, headers=headers) as response:
        async for piece in response.content.iter_any():
            seen += piece
            if not first_s and FIRST in seen:
                first_s = time.perf_counter() - started
    if not seen.endswith(b"data: [DONE]\n\n"):
        raise RuntimeError(f"{url}: {seen[-500:]!r}")
    usage = _COMPLETION_TOKENS.search(seen)
    return Streamed(first_s, int(usage[1]) if usage else 0)


@contextlib.contextmanager
def _bed() -> Iterator[Bed]:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        ports = ("--grpc-port", "0", "--metrics-port", "0")
        triton, _ = stack.enter_context(_command("cloud_pool", "triton", *ports, "--model", MODEL))
        grpc = dict(field.split("=", 1) for field in triton.split())["grpc"]
        flags = ("--port", "0", "--triton", grpc, "--log", "warning")
        gateway, pid = stack.enter_context(_command("cloud_pool", "serve", *flags))
        gateway_url = dict(field.split("=", 1) for field in gateway.split())["url"]
        settings = {
            "server.port": "0",
            "state_dir": folder,
            "engine.enabled": "false",
            "clouds.main.url": gateway_url,
            "log": "warning",
        }
        changes = tuple(part for key, value in settings.items() for part in ("--set", f"{key}={value}"))
        edge, _ = stack.enter_context(_command("edge_node", "serve", *changes))
        yield Bed(grpc, gateway_url, f"{edge.removeprefix('url=')}/v1", pid)


@contextlib.contextmanager
def _command(package: str, *arguments: str) -> Iterator[tuple[str, int]]:
    """A command of ours: what its ready line says, and its process id."""
    command = [sys.executable, "-m", f"causeway_server.{package}", *arguments]
    process = subprocess.Popen(
        command, cwd=ROOT, env=dict(os.environ), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    try:
        ready = next((line for line in process.stdout if line.startswith("ready ")), None)
        if ready is None:
            raise RuntimeError(f"{' '.join(command)} did not become ready")
        yield ready.removeprefix("ready ").strip(), process.pid
    finally:
        process.terminate()
        process.wait(timeout=60.0)
