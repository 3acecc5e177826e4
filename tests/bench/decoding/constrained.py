"""What a constraint costs: a schema in force beside free decoding, a new schema's first token, calls by jump-forward.

`python -m tests.bench.decoding.constrained` measures these rows alone; `make bench-llm` has them in its table.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from causeway_server.edge_node.backends.engine.backend import EngineBackend, EngineModel
from causeway_server.edge_node.config.schema import EngineConfig
from causeway_server.models.catalog.artifact import find_artifact
from causeway_server.models.llama_cpp.native.resources import choose_threads
from causeway_server.router.types import Message, Request, ResponseFormat, Tool, ToolChoice
from tests.tool import run_tool

from ..bench_engine import call_row
from ..results import cells
from ..rows import Row
from .servers import GREEDY, START_S, OurEngine, backend_request

MODEL, TINY = "qwen-05b", "assistant"
STREAMS, IN_FLIGHT, TOKENS = 4, 8, 48
_LONG = {"type": "object", "properties": {"story": {"type": "string", "minLength": 2000}}, "required": ["story"]}
_WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
    },
    "required": ["city", "unit", "days"],
    "additionalProperties": False,
}
_TOOL = Tool("get_weather", "The weather of a city", json.dumps(_WEATHER))
_COMMANDS = ("wake me up at six am", "turn on the light in the kitchen", "play some jazz", "what is the weather today")


class Made(msgspec.Struct, frozen=True):
    """One answer: its tokens, and the seconds to the first and to the last."""

    tokens: int
    first_s: float
    whole_s: float


async def measure(ours: OurEngine, rounds: int) -> list[Row]:
    """Return the rows of a model of the demonstration, and of the pair's device model."""
    rows = [await _in_force(ours, streams, rounds) for streams in (1, STREAMS)]
    rows += [await _new_schema(ours, rounds), await _calls(ours, rounds), await _tiny(rounds)]
    return [*rows, call_row(choose_threads(0), IN_FLIGHT, 0.85)]


def chat(text: str, tokens: int = TOKENS, **fields: object) -> Request:
    return Request(
        kind="chat",
        model="small",
        messages=(Message("user", text),),
        max_tokens=tokens,
        sampling=GREEDY,
        **fields,  # type: ignore[arg-type]
    )


def form(schema: object) -> ResponseFormat:
    return ResponseFormat("json_schema", "answer", json.dumps(schema))


async def run(backend: EngineBackend, request: Request) -> Made:
    started, first_s, tokens = time.perf_counter(), 0.0, 0
    async for chunk in backend.generate(backend_request(request)):
        if chunk.tokens and not first_s:
            first_s = time.perf_counter() - started
        tokens += chunk.tokens
    return Made(tokens, first_s, time.perf_counter() - started)


async def _rate(backend: EngineBackend, requests: Sequence[Request]) -> float:
    """Return tokens/s of all requests together."""
    started = time.perf_counter()
    made = await asyncio.gather(*(run(backend, request) for request in requests))
    return sum(one.tokens for one in made) / (time.perf_counter() - started)


async def _in_force(ours: OurEngine, streams: int, rounds: int) -> Row:
    pairs: list[tuple[float, float]] = []
    for number in range(rounds + 1):
        texts = [f"Tell me story {number} of lighthouse {stream}." for stream in range(streams)]
        free = await _rate(ours.backend, [chat(text) for text in texts])
        pairs.append((await _rate(ours.backend, [chat(text, response_format=form(_LONG)) for text in texts]), free))
    name = f"{streams} stream{'s' if streams > 1 else ''}: answers constrained to a JSON schema ÷ unconstrained answers"
    return _ratio(name, pairs[1:], 0.95, "tokens/s")


async def _new_schema(ours: OurEngine, rounds: int) -> Row:
    """A schema of 10 kB that no request had before; its properties are optional."""
    later: list[float] = []
    for number in range(rounds + 1):
        names = [f"a property of number {number} and place {place}" for place in range(150)]
        schema = {"type": "object", "properties": {name: {"type": "string", "maxLength": 9} for name in names}}
        text = f"Tell me the {number}th story of the harbour."
        free = await run(ours.backend, chat(text, 1))
        again = f"Tell me the {number}th story of the island."
        later.append(
            1000 * ((await run(ours.backend, chat(again, 1, response_format=form(schema)))).first_s - free.first_s)
        )
    size = len(json.dumps(schema)) // 1000
    return Row(
        "time that a new JSON schema adds to the first token",
        statistics.median(later[1:]),
        "ms",
        50,
        "lower",
        f"a schema of {size} kB",
    )


async def _calls(ours: OurEngine, rounds: int) -> Row:
    """As many tokens as a call has, decoded freely behind the same prompt, take as long as a call without it."""
    pairs: list[tuple[float, float]] = []
    for number in range(rounds + 1):
        fields = {"tools": (_TOOL,), "tool_choice": ToolChoice("function", "get_weather")}
        call = await run(ours.backend, chat(f"What is the weather in Rome for {number + 1} days?", 120, **fields))
        free = await run(ours.backend, chat(f"What is the weather in Oslo for {number + 1} days?", call.tokens))
        pairs.append(
            (1 / (call.whole_s - call.first_s), (free.tokens - 1) / (call.tokens - 1) / (free.whole_s - free.first_s))
        )
    return _ratio(
        "required function calls: with jump-forward decoding ÷ one step per token",
        pairs[1:],
        1.5,
        "calls/s after the first token",
    )


async def _tiny(rounds: int) -> Row:
    path = find_artifact(TINY).path
    async with _backend(path, "calls") as held, _backend(path, "text") as free:
        pairs: list[tuple[float, float]] = []
        for number in range(3 * rounds + 1):
            texts = [f"{_COMMANDS[at % len(_COMMANDS)]} {number} {at}" for at in range(IN_FLIGHT)]
            requests = [chat(text) for text in texts]
            pairs.append((await _rate(held, requests), await _rate(free, requests)))
    name = f"{IN_FLIGHT} new texts at once: constrained function calls ÷ unconstrained answers, engine child included"
    return _ratio(name, pairs[1:], None, "tokens/s")


@contextlib.asynccontextmanager
async def _backend(path: Path, answers: str) -> AsyncIterator[EngineBackend]:
    backend = EngineBackend(path, EngineConfig(), EngineModel(answers=answers))  # type: ignore[arg-type]
    await backend.start()
    try:
        await backend.ready(asyncio.get_running_loop().time() + START_S)
        yield backend
    finally:
        await backend.close()


def _ratio(name: str, pairs: list[tuple[float, float]], limit: float | None, unit: str) -> Row:
    ours, free = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
    ratio = statistics.median(one / other for one, other in pairs)
    return Row(name, ratio, "x", limit, "higher", f"{ours:.1f} {unit} ÷ {free:.1f} {unit}")


async def _main(rounds: int) -> list[Row]:
    path = find_artifact(MODEL).path
    async with _backend(path, "text") as backend:
        return await measure(OurEngine(backend), rounds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each comparison")
    return print_rows(asyncio.run(_main(parser.parse_args().rounds)))


def print_rows(rows: Sequence[Row]) -> int:
    """Print a table. Returns 1 if a row misses its limit."""
    table = Table("what", "measured", "limit", "", "behind it")
    for row in rows:
        table.add_row(*cells(row), style="red" if row.holds is False else None)
    Console(soft_wrap=True).print(table)
    return 1 if any(row.holds is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(run_tool(main))
