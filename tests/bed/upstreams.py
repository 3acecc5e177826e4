"""One order of fallback over real upstreams of four kinds, each killed in turn under load; then a real vLLM's speed.

A real vLLM on the processor (`make test-vllm` installs it; `--without vllm` leaves it out), a real `llama_cpp.server`,
a real Triton with our model, and a real Triton with a stand-in that has TensorRT-LLM's published configuration stand
behind one gateway. Clients ask for the first tier in a closed loop while it is killed; then the next one answers.
A stream that had begun when its server died may break (nothing after the first token is repeated); no other may, until
the last server is killed as well. Every answer has one end and one record in the audit log, with the tokens that its
client was told, and their price.

On vLLM: streams directly and through the gateway in turns, and clients that leave.

    python -m tests.bench upstreams
    python -m tests.bench upstreams --without vllm --seconds 4
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from tests.bench.rows import Row
from tests.cloud_pool.upstreams.trtllm_triton import TrtllmTriton
from tests.openai_servers import OpenAIServer, llama_server, running, vllm_server
from tests.stack import TOKEN, Stack

from .figures import table

Body = dict[str, Any]
TIERS = ("vllm", "llama_server", "triton", "trtllm")
AT_ONCE = 8
STREAMS, TOKENS, SPEED_TOKENS = 16, 16, 64
MIN_SPEED = 0.95
PROMPT = "Tell me about the harbour of an old town by the sea"
WITHOUT = {"vllm": ["tools"], "llama_server": ["tools", "schemas"]}
# USD for a million tokens of the prompt, of its cached part, and of the answer.
PRICES = {"vllm": (0.31, 0.07, 1.3), "llama_server": (0.17, 0.05, 0.7), "triton": (5, 2, 11), "trtllm": (3, 1, 13)}


class Stream(msgspec.Struct, frozen=True):
    """One streamed request.

    Attributes:
        ends: Its finish reasons.
        error: The code of an error, before or after the first token.
        prompt_tokens: Those of the prompt, and those of them that were cached.
        ended: When it ended, in monotonic time.
    """

    id: str
    tier: str
    began: bool
    ends: int
    error: str
    prompt_tokens: tuple[int, int]
    completion_tokens: int
    ended: float

    @property
    def answered(self) -> bool:
        return self.ends == 1 and not self.error


class Upstreams:
    """The servers, best first, and the gateway before them."""

    def __init__(self, folder: Path, exits: contextlib.ExitStack, without: list[str]) -> None:
        self.stack, self.kill = Stack(folder), dict[str, Callable[[], None]]()
        self.audit, tiers = folder / "audit.jsonl", list[Body]()
        self.vllm: OpenAIServer | None = None
        for name in (name for name in TIERS if name not in without):
            tiers.append({"name": name, "can": ["chat"], "context_tokens": 2048, **self._start(name, folder, exits)})
        config = {
            "server": {"default_deadline_s": 300},
            "audit_file": str(self.audit),
            "tiers": [
                {"concurrency": 600, "max_queued": 600, "min_concurrency": 0, "ttft_objective_s": 60, **tier}
                for tier in tiers
            ],
            "degradation": {"tiers": [tier["name"] for tier in tiers], "warm_up_after_idle_s": 0},
            "tenants": {
                "prices": [
                    dict(zip(("input", "cached_input", "output"), PRICES[tier["name"]], strict=True), tier=tier["name"])
                    for tier in tiers
                ]
            },
            # A processor is silent for long; a killed server is known by its connections.
            "load_balancing": {"silent_before_probe_s": 60, "probe_timeout_s": 60, "hung_after_s": 300},
        }
        self.names = [str(tier["name"]) for tier in tiers]
        self.stack.start_gateway(config=json.dumps(config), addressed=True).ready()

    def _start(self, name: str, folder: Path, exits: contextlib.ExitStack) -> Body:
        """Start a server. Returns its tier's keys."""
        if name == "triton":
            triton = self.stack.start_triton()
            triton.ready()
            self.kill[name] = triton.kill
            return {"model": "assistant-large", "artifact": "assistant-large", "triton": f"127.0.0.1:{self.stack.grpc}"}
        if name == "trtllm":
            trtllm = TrtllmTriton(folder)
            exits.callback(trtllm.process.kill)
            trtllm.process.ready()
            self.kill[name] = trtllm.process.kill
            (folder / "words.jinja").write_text("{{ messages[-1].content }}")
            template = {"template_file": str(folder / "words.jinja"), "upstream": {"kind": "trtllm"}}
            return {"model": "ensemble", "endpoints": [trtllm.address], **template}
        server = exits.enter_context(running(vllm_server(folder) if name == "vllm" else llama_server(folder)))
        self.kill[name] = server.kill
        self.vllm = server if name == "vllm" else self.vllm
        upstream = {"kind": "openai", "urls": [server.url], "without": WITHOUT[name], "token_timeout_s": 120}
        upstream["verify_features"] = name == "vllm"
        return {"model": server.model, "upstream": upstream}

    def records(self) -> dict[str, list[Body]]:
        found: dict[str, list[Body]] = {}
        for line in self.audit.read_text().splitlines():
            record = json.loads(line)
            found.setdefault(record["id"], []).append(record)
        return found


async def stream(session: aiohttp.ClientSession, url: str, **fields: object) -> Stream:
    """Ask for a streamed answer, and read it to its end."""
    messages = [{"role": "user", "content": PROMPT}]
    body: Body = {"stream": True, "messages": messages, "temperature": 0, "max_tokens": TOKENS}
    body["stream_options"] = {"include_usage": True}
    ends, began, error = 0, False, ""
    usage: Body = {}
    # Without a fallback, unless the client's first tier is to be replaced.
    critical = {"x-causeway-critical": "true"} if "ignore_eos" in fields else {}
    async with session.post(f"{url}/chat/completions", json=body | fields, headers=critical) as response:
        headers = {name.lower(): value for name, value in response.headers.items()}
        if response.status != 200:
            error = (await response.json())["error"]["code"] or str(response.status)
        else:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    error = event["error"]["code"] if "error" in event else error
                    usage = event.get("usage") or usage
                    for choice in event.get("choices", ()):
                        began = began or bool(choice["delta"].get("content"))
                        ends += choice["finish_reason"] is not None
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    told = (usage.get("prompt_tokens", 0), cached), usage.get("completion_tokens", 0)
    names = headers.get("x-request-id", ""), headers.get("x-causeway-tier", "")
    return Stream(*names, began, ends, error, *told, time.monotonic())


async def load(session: aiohttp.ClientSession, url: str, model: str, stop: asyncio.Event) -> list[Stream]:
    """Ask in a closed loop, `AT_ONCE` at a time, until `stop`."""

    async def client() -> list[Stream]:
        found = [await stream(session, url, model=model)]
        while not stop.is_set():
            found.append(await stream(session, url, model=model))
        return found

    return [one for many in await asyncio.gather(*(client() for _ in range(AT_ONCE))) for one in many]


async def deaths(upstreams: Upstreams, session: aiohttp.ClientSession, seconds: float) -> list[Row]:
    """Kill each tier in the middle of a load. Returns the rows."""
    url, found, lines = f"{upstreams.stack.gateway_url}/v1", list[Stream](), []
    for dying in upstreams.names:
        stop = asyncio.Event()
        asked = asyncio.create_task(load(session, url, upstreams.names[0], stop))
        await asyncio.sleep(seconds / 2.0)
        none_left = time.monotonic()  # from the last death on
        await asyncio.to_thread(upstreams.kill[dying])
        await asyncio.sleep(seconds / 2.0)
        stop.set()
        streams = await asked
        tiers = Counter(one.tier for one in streams if one.answered)
        broken = [one for one in streams if not one.answered]
        by_tier = ", ".join(f"{tier} {count}" for tier, count in tiers.items())
        lines.append(
            [dying, len(streams), by_tier, sum(one.began for one in broken), sum(not one.began for one in broken)]
        )
        found += streams
    print(table(("killed", "asked", "answered by", "broken after the first token", "failed"), lines))
    await asyncio.sleep(1.0)  # the audit log is written behind the answers
    records = upstreams.records()
    failed = [one for one in found if not one.answered and not one.began and one.ended <= none_left]
    refused = sum(not one.answered and one.ended > none_left for one in found)
    untrue = [one for one in found if (one.answered or not one.began) and not is_billed(one, records.get(one.id, []))]
    cut = sum(one.began and not one.answered for one in found)
    note = f"of {len(found)} requests; {cut} broke after their first token"
    errors = ", ".join(sorted({one.error for one in failed}))
    return [
        Row(
            "requests that failed before their first token", len(failed), "", 0.0, note=f"{note}; {errors}".rstrip("; ")
        ),
        Row("answers without exactly one end", sum(one.ends != 1 for one in found if not one.error), "", 0.0),
        Row(
            "answers whose audit record differs from what the client got",
            len(untrue),
            "",
            0.0,
            note=f"of {len(records)} records; {refused} requests were refused because no server was left",
        ),
    ]


def is_billed(one: Stream, records: list[Body]) -> bool:
    """Return whether an answer has one record, with its tier, its tokens and their price; a failure costs nothing."""
    if not one.answered:
        return not any(record["pico_usd"] for record in records)
    if len(records) != 1 or (records[0]["tier"], records[0]["outcome"]) != (one.tier, "ok"):
        return False
    (record,) = records
    prompt, cached, answer = (record[f"{kind}_tokens"] for kind in ("prompt", "cached", "completion"))
    price = [round(usd * 1_000_000) for usd in PRICES[one.tier]]  # 1e-12 USD a token
    usd = (prompt - cached) * price[0] + cached * price[1] + answer * price[2]
    told = (0, 0) if record["estimated"] else (prompt, cached)
    return (told, answer, usd) == (one.prompt_tokens, one.completion_tokens, record["pico_usd"])


async def speed(upstreams: Upstreams, session: aiohttp.ClientSession, rounds: int) -> list[Row]:
    """Measure streams directly and through the gateway, in turns. Returns the row of the ratio."""
    assert upstreams.vllm is not None
    urls = {
        "direct": (upstreams.vllm.url, upstreams.vllm.model),
        "gateway": (f"{upstreams.stack.gateway_url}/v1", "vllm"),
    }
    rates: dict[str, list[float]] = {name: [] for name in urls}
    for turn in range(rounds + 1):
        for name in sorted(urls, reverse=bool(turn % 2)):
            url, model = urls[name]
            began = time.perf_counter()
            asked = [
                stream(session, url, model=model, ignore_eos=True, max_tokens=SPEED_TOKENS) for _ in range(STREAMS)
            ]
            tokens = sum(one.completion_tokens for one in await asyncio.gather(*asked))
            assert tokens == STREAMS * SPEED_TOKENS, tokens
            rates[name].append(tokens / (time.perf_counter() - began))
    ratios = [through / direct for through, direct in zip(rates["gateway"][1:], rates["direct"][1:], strict=True)]
    middle = {name: statistics.median(found[1:]) for name, found in rates.items()}
    note = (
        f"gateway {middle['gateway']:.1f}, direct {middle['direct']:.1f} tokens/s; {rounds} rounds, {STREAMS} streams"
    )
    return [
        Row(
            "vLLM's tokens/s, through the gateway / called directly",
            statistics.median(ratios),
            "x",
            MIN_SPEED,
            "higher",
            note,
        )
    ]


async def leave(upstreams: Upstreams, session: aiohttp.ClientSession, clients: int) -> list[Row]:
    """Let clients leave their streams. Returns the row of the time until vLLM runs nothing."""
    assert upstreams.vllm is not None
    url, metrics = f"{upstreams.stack.gateway_url}/v1", f"http://127.0.0.1:{upstreams.vllm.port}/metrics"

    async def running_now() -> tuple[float, float]:
        """Return vLLM's running and waiting requests, and the tokens that it has made."""
        async with session.get(metrics) as response:
            text = await response.text()
        requests = re.findall(r"^vllm:num_requests_(?:running|waiting)\{.*\} (\S+)$", text, re.MULTILINE)
        made = re.findall(r"^vllm:generation_tokens_total\{.*\} (\S+)$", text, re.MULTILINE)
        return sum(map(float, requests)), sum(map(float, made))

    fields: Body = {"model": "vllm", "max_tokens": 1000, "ignore_eos": True}
    asked = [asyncio.create_task(stream(session, url, **fields)) for _ in range(clients)]
    while (await running_now())[0] < clients:
        await asyncio.sleep(0.05)
    steps, made = list[float](), (await running_now())[1]
    while len(steps) < 3:  # a step's time, from one change of the count to the next
        began = time.perf_counter()
        while (now_made := (await running_now())[1]) == made:
            await asyncio.sleep(0.01)
        steps.append(time.perf_counter() - began)
        made = now_made
    for task in asked:
        task.cancel()
    left = time.perf_counter()
    await asyncio.gather(*asked, return_exceptions=True)
    while (await running_now())[0]:
        await asyncio.sleep(0.01)
    took_s, step_s = time.perf_counter() - left, max(steps)
    note = f"a step takes {step_s:.2f} s"
    what = f"time from the moment when {clients} clients leave to the moment when vLLM runs no request"
    return [Row(what, took_s, "s", step_s + 1.0, note=note)]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--without", action="append", default=[], choices=TIERS[:3], help="a server to leave out")
    parser.add_argument("--seconds", type=float, default=10.0, help="load around each death")
    parser.add_argument("--rounds", type=int, default=9, help="turns of the comparison on vLLM")
    parser.add_argument("--leaving", type=int, default=500, help="clients that leave vLLM")


async def main(options: argparse.Namespace) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="causeway-upstreams-") as folder, contextlib.ExitStack() as exits:
        upstreams = await asyncio.to_thread(Upstreams, Path(folder), exits, options.without)
        exits.callback(lambda: [part.kill() for part in upstreams.stack.parts.values() if part.popen.poll() is None])
        headers, connections = {"authorization": f"Bearer {TOKEN}"}, aiohttp.TCPConnector(limit=0)
        patience = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(headers=headers, connector=connections, timeout=patience) as session:
            rows = list[Row]()
            if upstreams.vllm is not None:
                rows += await speed(upstreams, session, options.rounds)
                rows += await leave(upstreams, session, options.leaving)
            return [*rows, *await deaths(upstreams, session, options.seconds)]
