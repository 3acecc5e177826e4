"""An agent's session on the device: 60 turns, 12 tools and a prefix of 8,000 tokens, in each dialect and in turns.

    .venv/bin/causeway-models pull demo:qwen --yes
    python -m tests.bed.agent_prefix ~/.local/share/causeway/models/qwen-05b/model.gguf

A turn adds a call and its result, and asks for the next one. Each session begins differently, so that its first turn is
cold. In `mixed` the dialect changes with each turn. From turn 2 on at least 95 % of the prompt's tokens are to come
from the KV cache, the first token of a turn is to take at most 0.15 of the cold one's time (median), `cached_tokens` is
to be what the prompt has in common with the one before, and its length what `/v1/tokenize` counts.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil

from causeway_server.edge_node.app import build
from causeway_server.edge_node.backends.engine.backend import EngineBackend
from causeway_server.edge_node.config.schema import Config, EngineConfig, ServerConfig
from tests.tool import run_tool

POLICY = """
version: 1
name: bed
targets: {small: {at: edge, model: m-small}}
routes: [{name: all, use: [small]}]
"""
WORDS = "river market signal copper window garden letter branch silver number engine morning paper station".split()
MIN_CACHED, MAX_FIRST = 0.95, 0.15
_START_S, _TURN_S = 300.0, 3600.0


class Turn(msgspec.Struct, frozen=True):
    """What a turn cost. `expected`: the tokens that its prompt has in common with the one before.

    `first_cpu_s`: processor time of daemon and engine until the first token, which other work does not change.
    """

    dialect: str
    prompt: int
    cached: int
    first_s: float
    first_cpu_s: float
    counted: int
    expected: int
    generated: int

    @property
    def exact(self) -> bool:
        """Whether the usage is right: what the turn before generated may be in common, too."""
        within = self.expected <= self.cached <= self.expected + _ANSWER_TOKENS
        return self.prompt == self.counted and (within or self.cached == self.prompt - 1)


_ANSWER_TOKENS = 8


class Session:
    """The conversation so far, in the forms of the three dialects."""

    def __init__(self, name: str, rng: random.Random, prefix_words: int) -> None:
        self._rng = rng
        self._system = f"You are the agent {name}. " + self._words(prefix_words)
        self._tools = [(f"tool_{at}", self._words(30)) for at in range(12)]
        self._steps: list[tuple[str, str, str]] = []  # tool, argument, result

    def step(self) -> None:
        """Add a call and its result."""
        self._steps.append((self._rng.choice(self._tools)[0], self._words(4), self._words(70)))

    def chat(self) -> dict[str, Any]:
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": self._system},
            {"role": "user", "content": _TASK},
        ]
        for at, (tool, argument, result) in enumerate(self._steps):
            function = {"name": tool, "arguments": msgspec.json.encode({"text": argument}).decode()}
            call = {"id": f"call_{at}", "type": "function", "function": function}
            messages += [{"role": "assistant", "content": None, "tool_calls": [call]}]
            messages += [{"role": "tool", "tool_call_id": f"call_{at}", "content": result}]
        tools = [
            {"type": "function", "function": {"name": n, "description": d, "parameters": _SCHEMA}}
            for n, d in self._tools
        ]
        return {"messages": messages, "tools": tools}

    def message(self) -> dict[str, Any]:
        messages: list[dict[str, Any]] = [{"role": "user", "content": _TASK}]
        for at, (tool, argument, result) in enumerate(self._steps):
            call = {"type": "tool_use", "id": f"call_{at}", "name": tool, "input": {"text": argument}}
            found = {"type": "tool_result", "tool_use_id": f"call_{at}", "content": [{"type": "text", "text": result}]}
            messages += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [found]}]
        tools = [{"name": n, "description": d, "input_schema": _SCHEMA} for n, d in self._tools]
        system = [{"type": "text", "text": self._system, "cache_control": {"type": "ephemeral"}}]
        return {"system": system, "messages": messages, "tools": tools}

    def response(self) -> dict[str, Any]:
        items: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "input_text", "text": _TASK}]}]
        for at, (tool, argument, result) in enumerate(self._steps):
            arguments = msgspec.json.encode({"text": argument}).decode()
            items += [{"type": "function_call", "call_id": f"call_{at}", "name": tool, "arguments": arguments}]
            items += [{"type": "function_call_output", "call_id": f"call_{at}", "output": result}]
        tools = [{"type": "function", "name": n, "description": d, "parameters": _SCHEMA} for n, d in self._tools]
        return {"instructions": self._system, "input": items, "tools": tools}

    def _words(self, count: int) -> str:
        return " ".join(self._rng.choice(WORDS) for _ in range(count))


_TASK = "Find out where the copper is, and tell me."
_SCHEMA = {"type": "object", "properties": {"text": {"type": "string", "description": "What to look for"}}}
_Usage = tuple[int, int, int]


def _chat_usage(event: dict[str, Any]) -> _Usage | None:
    if (usage := event.get("usage")) is None:
        return None
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], usage["completion_tokens"]


def _message_usage(event: dict[str, Any]) -> _Usage | None:
    if event["type"] != "message_delta":
        return None
    usage = event["usage"]
    cached = usage["cache_read_input_tokens"]
    return usage["input_tokens"] + cached, cached, usage["output_tokens"]


def _response_usage(event: dict[str, Any]) -> _Usage | None:
    if event["type"] not in ("response.completed", "response.incomplete"):
        return None
    usage = event["response"]["usage"]
    return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], usage["output_tokens"]


_Dialect = tuple[str, Callable[[Session], dict[str, Any]], dict[str, Any], Callable[[dict[str, Any]], _Usage | None]]
DIALECTS: Mapping[str, _Dialect] = {
    "chat": (
        "/v1/chat/completions",
        Session.chat,
        {"max_tokens": _ANSWER_TOKENS, "temperature": 0, "stream_options": {"include_usage": True}},
        _chat_usage,
    ),
    "messages": ("/v1/messages", Session.message, {"max_tokens": _ANSWER_TOKENS, "temperature": 0}, _message_usage),
    "responses": (
        "/v1/responses",
        Session.response,
        {"max_output_tokens": _ANSWER_TOKENS, "temperature": 0, "store": False},
        _response_usage,
    ),
}


async def take_turn(
    http: aiohttp.ClientSession, dialect: str, session: Session, before: list[int]
) -> tuple[Turn, list[int]]:
    """Send a turn. Return what it cost, and its prompt's tokens. `before`: those of the turn before."""
    path, body_of, fields, usage_of = DIALECTS[dialect]
    async with http.post("/v1/tokenize", json={"model": "small", **session.chat()}) as reply:
        tokens: list[int] = (await reply.json())["tokens"]
    common = next(
        (at for at, (a, b) in enumerate(zip(before, tokens, strict=False)) if a != b), min(len(before), len(tokens))
    )
    first_s, first_cpu_s, usage = 0.0, 0.0, None
    started, cpu_s = time.perf_counter(), _cpu_s()
    async with http.post(path, json={"model": "small", "stream": True, **fields, **body_of(session)}) as reply:
        assert reply.status == 200, await reply.text()
        async for line in reply.content:
            if not line.startswith(b"data: {"):
                continue
            if not first_s:
                first_s, first_cpu_s = time.perf_counter() - started, _cpu_s() - cpu_s
            usage = usage_of(msgspec.json.decode(line[6:])) or usage
    assert usage is not None, "the stream has no usage"
    return Turn(dialect, usage[0], usage[1], first_s, first_cpu_s, len(tokens), common, usage[2]), tokens


def _cpu_s() -> float:
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(sum(one.cpu_times()[:2]) for one in processes)


async def measure(model: Path, turns: int, prefix_words: int, seed: int, names: list[str], threads: int) -> bool:
    passed = True
    with tempfile.TemporaryDirectory() as folder:
        policy = Path(folder) / "policy.yaml"
        policy.write_text(POLICY)
        server = ServerConfig(port=0, default_deadline_s=_TURN_S)
        config = Config(policy=str(policy), server=server, state_dir=str(Path(folder) / "state"))
        engine = EngineBackend(
            model, EngineConfig(threads=threads), stuck_s=_TURN_S
        )  # a busy machine is no stuck engine
        app = build(config, make_engine=lambda _: engine, environ={})
        await app.start()
        try:
            await engine.ready(asyncio.get_running_loop().time() + _START_S)
            timeout = aiohttp.ClientTimeout(_TURN_S)
            async with aiohttp.ClientSession(f"http://127.0.0.1:{app.port}", timeout=timeout) as http:
                for name in names:
                    passed = await _session(http, name, turns, prefix_words, seed) and passed
        finally:
            await app.close()
    return passed


async def _session(http: aiohttp.ClientSession, name: str, turns: int, prefix_words: int, seed: int) -> bool:
    session = Session(name, random.Random(f"{name} {seed}"), prefix_words)
    taken: list[Turn] = []
    tokens: list[int] = []
    for at in range(turns):
        session.step()
        dialect = list(DIALECTS)[at % len(DIALECTS)] if name == "mixed" else name
        turn, tokens = await take_turn(http, dialect, session, tokens)
        taken.append(turn)
        print(
            f"  {at + 1}: {turn.cached} of {turn.prompt} cached, first token {turn.first_s:.2f} s, "
            f"processor {turn.first_cpu_s:.2f} s",
            flush=True,
        )
    cold, warm = taken[0], taken[1:]
    worst = min(turn.cached / turn.prompt for turn in warm)
    firsts = sorted(turn.first_s / cold.first_s for turn in warm)
    cpu = statistics.median(turn.first_cpu_s / cold.first_cpu_s for turn in warm)
    inexact = [turn for turn in warm if not turn.exact]
    print(
        f"{name}: {turns} turns, prompts of {cold.prompt} to {warm[-1].prompt} tokens; from the KV cache from turn 2 "
        f"on {sum(t.cached for t in warm) / sum(t.prompt for t in warm):.3f}, at worst {worst:.3f}; cold first token "
        f"{cold.first_s:.2f} s, later ones {statistics.median(firsts):.3f} of it (median), {firsts[-1]:.3f} at worst, "
        f"of its processor time {cpu:.3f}; inexact: {len(inexact)}",
        flush=True,
    )
    for turn in inexact[:3]:
        print(f"  {turn}", flush=True)
    return worst >= MIN_CACHED and statistics.median(firsts) <= MAX_FIRST and not inexact


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a GGUF file whose template knows tools")
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--prefix-words", type=int, default=6800, help="of the system prompt, beside the tools")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--session", action="append", choices=[*DIALECTS, "mixed"], help="only these")
    parser.add_argument("--threads", type=int, default=0, help="of the engine; on a busy machine one is the fastest")
    args = parser.parse_args()
    names = args.session or [*DIALECTS, "mixed"]
    passed = asyncio.run(measure(args.model, args.turns, args.prefix_words, args.seed, names, args.threads))
    print("PASS" if passed else "FAIL")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(run_tool(main))
