"""`python -m tests.bench.decoding.real_weights` (`make bench-llm`): the engine on a model of the demonstration.

Our engine as the daemon starts it, threads chosen by itself, beside raw `llama_decode`, `python -m llama_cpp.server`
and llama.cpp's own server of today (package xllamacpp), each with every core; the contestants take turns in each round,
and each figure is the median of the rounds' own ratios. Keeps the table as a section of tests/bench/RESULTS.md; of
another model (`--model`) it prints the rows beside the others only.

A round's prompts are new to every contestant and the same for all: the servers keep the KV cache of their last
request, so that a prompt that comes again costs it one token, while raw `llama_decode` decodes all of it. What a prompt
costs that comes again has a row of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.metadata
import itertools
import os
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil
from rich.console import Console
from rich.table import Table

from causeway_server.edge_node.config.schema import EngineConfig
from causeway_server.models.catalog.artifact import ArtifactError, find_artifact
from causeway_server.router.types import Message
from tests.tool import run_tool

from ..results import RESULTS, cells, machine, with_section
from ..rows import Row
from . import constrained, embeddings
from .raw import Raw
from .servers import HttpServer, OurEngine, ShortAnswer, llama_server, our_engine, xllamacpp_server

MODEL = "qwen-05b"
STREAMS = 4
PROMPT_TOKENS, ANSWER_TOKENS = 32, 48  # of prompts at most
RESTARTS = 3
TRIES = 20  # of a round whose answers are not whole
SYSTEM_WORDS = 480  # about 500 tokens with the template's own
TEXT = """The harbour lies on the north side of the island. Every morning at six the first boats leave it, long before
the market opens, and they come back in the early afternoon with what the night has left in the nets. In winter, when
storms blow from the west, the fishermen stay at home, mend their tools, and tell the children about the years in which
the water froze and people walked to the mainland over the ice, carrying lamps and bread."""
REPEAT = f'Repeat this text word for word, but write "port" in place of "harbour":\n\n{TEXT}'
OPEN_QUESTION = "Explain how a lighthouse works, and why sailors still need them today."
LOOKUP_TOKENS = 96
_TITLE = "## Real weights"
_SIDES = {"ours": "engine", "raw": "llama_decode", "server": "llama_cpp.server", "xllamacpp": "xllamacpp"}


Pair = tuple[float, float]
T = TypeVar("T")


class Speeds(msgspec.Struct, frozen=True):
    """Tokens/s of one round."""

    raw: float
    ours: float
    server: float
    xllamacpp: float


class Contestants(msgspec.Struct, frozen=True):
    raw: Raw
    ours: OurEngine
    server: HttpServer
    xllamacpp: HttpServer


class OneStream(msgspec.Struct, frozen=True):
    """A round of one stream: a new prompt, the same again, and the answer from its first token to its last."""

    new: Speeds
    again: Speeds
    decoding: Speeds


class Prompts:
    """Prompts that no contestant has seen: each begins with another word than those before it."""

    def __init__(self) -> None:
        words = sorted({word.strip(".,").lower() for word in TEXT.split()})
        self._texts = (
            f"{word.title()}, story {number}. A long tale about a lighthouse keeper:\n\n"
            for number in itertools.count(1)
            for word in words
        )

    def take(self, count: int) -> list[str]:
        return list(itertools.islice(self._texts, count))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each comparison")
    parser.add_argument("--model", default=MODEL, help="name of an added model; default: %(default)s")
    arguments = parser.parse_args()
    rounds: int = arguments.rounds
    try:
        path = find_artifact(arguments.model).path
    except ArtifactError as error:
        sys.exit(f"{error}\nPull it: causeway-models pull demo:qwen")
    load = psutil.getloadavg()[0]
    rows = asyncio.run(_measure(path, rounds, features=arguments.model == MODEL))
    table = Table("what", "measured", "limit", "", "behind it")
    for row in rows:
        table.add_row(*cells(row), style="red" if row.holds is False else None)
    Console(soft_wrap=True).print(table)
    if arguments.model == MODEL:
        RESULTS.write_text(with_section(RESULTS.read_text(), _TITLE, _section(rows, rounds, load)))
    return 1 if any(row.holds is False for row in rows) else 0


async def _measure(path: Path, rounds: int, *, features: bool) -> list[Row]:
    """Return the rows beside the other contestants, and those of the engine's own features if they are asked for."""
    cores = len(os.sched_getaffinity(0))
    raw, prompts = Raw(path, cores, STREAMS, PROMPT_TOKENS + ANSWER_TOKENS), Prompts()
    rows = list[Row]()
    async with our_engine(path, EngineConfig()) as ours:
        async with llama_server(path, cores) as server, xllamacpp_server(path, cores, STREAMS) as today:
            sides = Contestants(raw, ours, server, today)
            one = [await _whole(_one_stream, sides, prompts) for _ in range(rounds + 1)][1:]
            many = [await _whole(_streams, sides, prompts) for _ in range(rounds)]
        raw.close()
        if features:
            rows += await _features(path, ours, rounds)
    new, repeated, decoding = ([getattr(r, which) for r in one] for which in ("new", "again", "decoding"))
    return [
        _ratio("one stream, tokens/s: engine ÷ llama_cpp.server", new, lambda r: r.ours / r.server, 1.0),
        _ratio(
            "one stream, first token to last, tokens/s: engine ÷ llama_cpp.server",
            decoding,
            lambda r: r.ours / r.server,
            1.0,
        ),
        _ratio(
            "one stream, a repeated prompt, tokens/s: engine ÷ llama_cpp.server",
            repeated,
            lambda r: r.ours / r.server,
            1.0,
        ),
        _ratio("one stream, tokens/s: engine ÷ xllamacpp", new, lambda r: r.ours / r.xllamacpp, 1.0),
        _ratio(
            "one stream, first token to last, tokens/s: engine ÷ xllamacpp",
            decoding,
            lambda r: r.ours / r.xllamacpp,
            1.0,
        ),
        _ratio("one stream, tokens/s: engine ÷ llama_decode called directly", new, lambda r: r.ours / r.raw, 0.95),
        _ratio(
            f"{STREAMS} streams, tokens/s: engine ÷ llama_decode called directly", many, lambda r: r.ours / r.raw, 0.95
        ),
        _ratio(f"{STREAMS} streams, tokens/s: engine ÷ llama_cpp.server", many, lambda r: r.ours / r.server, 1.3),
        _ratio(f"{STREAMS} streams, tokens/s: engine ÷ xllamacpp", many, lambda r: r.ours / r.xllamacpp, 1.0),
        *rows,
    ]


async def _features(path: Path, ours: OurEngine, rounds: int) -> list[Row]:
    first, again = await _first_tokens(ours, 0), await _first_tokens(ours, 0)
    repeated, opened = await _lookup(path, ours, rounds)
    held = await constrained.measure(ours, rounds)
    async with our_engine(path, EngineConfig(context_tokens=embeddings.CONTEXT)) as long:
        held.append(await embeddings.measure(long))
    restarted = [await _after_restart(path, number) for number in range(1, RESTARTS + 1)]
    return [
        _lookup_row("tokens/s with prompt lookup ÷ without, a text repeated with one change", repeated, 1.5),
        _lookup_row("tokens/s with prompt lookup ÷ without, an open question", opened, 0.97),
        _first_token_row(
            "time to the first token: system prompt seen before ÷ seen for the first time", [(first, again)]
        ),
        _first_token_row(
            "time to the first token after a restart: system prompt seen before it ÷ seen for the first time", restarted
        ),
        *held,
    ]


async def _whole(measure: Callable[[Contestants, Prompts], Awaitable[T]], sides: Contestants, prompts: Prompts) -> T:
    """Return the first of up to TRIES rounds in which every answer was whole: a small model ends some of its own."""
    for _ in range(TRIES - 1):
        with contextlib.suppress(ShortAnswer):
            return await measure(sides, prompts)
    return await measure(sides, prompts)


async def _streams(sides: Contestants, prompts: Prompts) -> Speeds:
    return await _speeds(sides, prompts.take(STREAMS), ANSWER_TOKENS)


async def _one_stream(sides: Contestants, prompts: Prompts) -> OneStream:
    """The prompt that comes again follows its first answer at once: it is the last one that the servers saw."""
    first = await _speeds(sides, prompts.take(1), 1)
    prompt = prompts.take(1)
    new = await _speeds(sides, prompt, ANSWER_TOKENS)
    again = await _speeds(sides, prompt, ANSWER_TOKENS)
    return OneStream(new, again, Speeds(*map(_decoding, msgspec.structs.astuple(first), msgspec.structs.astuple(new))))


def _decoding(first: float, whole: float) -> float:
    """Return tokens/s behind the first token: of an answer of one token, and of a whole one."""
    return (ANSWER_TOKENS - 1) / (ANSWER_TOKENS / whole - 1 / first)


async def _speeds(sides: Contestants, prompts: Sequence[str], tokens: int) -> Speeds:
    return Speeds(
        raw=await asyncio.to_thread(sides.raw.run, [sides.raw.tokens(prompt) for prompt in prompts], tokens),
        ours=await sides.ours.run(prompts, tokens, whole=True),
        server=await sides.server.run(prompts, tokens, whole=True),
        xllamacpp=await sides.xllamacpp.run(prompts, tokens, whole=True),
    )


async def _lookup(path: Path, ours: OurEngine, rounds: int) -> tuple[list[Pair], list[Pair]]:
    """Return (tokens/s with, without) prompt lookup of each round, for a repeated text and for an open question."""
    repeated, opened = list[Pair](), list[Pair]()
    async with our_engine(path, EngineConfig(prompt_lookup=False)) as without:
        for _ in range(rounds + 1):
            for text, pairs in ((REPEAT, repeated), (OPEN_QUESTION, opened)):
                pairs.append((await ours.chat(text, LOOKUP_TOKENS), await without.chat(text, LOOKUP_TOKENS)))
    return repeated[1:], opened[1:]


async def _first_tokens(ours: OurEngine, system: int) -> float:
    """Return the seconds to the first token behind the system prompt number `system`."""
    words = ("lamp", "door", "song", "clock", "rain")
    text = " ".join(words[(system + place * place) % len(words)] for place in range(SYSTEM_WORDS))
    return await ours.first_token_s((Message("system", f"{system}: {text}"), Message("user", "Hello!")))


async def _after_restart(path: Path, system: int) -> tuple[float, float]:
    config = EngineConfig(stored_prompts_bytes=256 * 2**20)
    with tempfile.TemporaryDirectory() as folder:
        async with our_engine(path, config, Path(folder), MODEL) as ours:
            first = await _first_tokens(ours, system)
        async with our_engine(path, config, Path(folder), MODEL) as ours:
            return first, await _first_tokens(ours, system)


def _ratio(name: str, rounds: list[Speeds], ratio: Callable[[Speeds], float], limit: float) -> Row:
    speeds = {words: statistics.median(getattr(r, side) for r in rounds) for side, words in _SIDES.items()}
    note = f"tokens/s: {', '.join(f'{words} {speed:.1f}' for words, speed in speeds.items())}"
    return Row(name, statistics.median(map(ratio, rounds)), "x", limit, "higher", note)


def _lookup_row(name: str, pairs: list[Pair], limit: float) -> Row:
    on, off = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
    ratio = statistics.median(on / off for on, off in pairs)
    return Row(name, ratio, "x", limit, "higher", f"with {on:.1f} tokens/s, without {off:.1f} tokens/s")


def _first_token_row(name: str, pairs: list[tuple[float, float]]) -> Row:
    first, again = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
    ratio = statistics.median(again / first for first, again in pairs)
    return Row(name, ratio, "x", 0.25, "lower", f"seen before {1000 * again:.0f} ms, first time {1000 * first:.0f} ms")


def _section(rows: list[Row], rounds: int, load: float) -> str:
    lines = [
        _TITLE,
        "",
        f"Command: `make bench-llm`, {datetime.now(UTC):%Y-%m-%d}.",
        f"Machine: {machine()}; load before the run {load:.1f}.",
        "The model is Qwen2.5-Coder-0.5B-Instruct, Q4_K_M.",
        f"Answers have {ANSWER_TOKENS} tokens. Figures are medians of {rounds} rounds in which the engines take turns.",
        "Causeway's engine chooses its number of threads by itself; the others use every core.",
        f"xllamacpp {importlib.metadata.version('xllamacpp')} is llama.cpp's own server, here with {STREAMS} slots.",
        "",
        "All engines get the same prompts of 15 to 17 tokens, new in each round, as a user's next question is.",
        "`llama_cpp.server` keeps the KV cache of its last request. If a prompt came again, it would decode one token,",
        "while `llama_decode` called directly would decode the whole prompt. So a repeated prompt has its own row.",
        'For the row "first token to last", the time of a one-token answer to another new prompt is subtracted.',
        "",
        "| what | measured | limit | | behind it |",
        "|---|---|---|---|---|",
        *("| " + " | ".join(cells(row)) + " |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(run_tool(main))
