"""The engine's tokens/s against raw `llama_decode` with the same batch, and against `python -m llama_cpp.server`.

Same model file, threads, prompts and lengths; the contestants take turns in short rounds, and each figure is the median
of the rounds' own ratios. Beside them: what it costs to hold calls to their utterances' words, over whole answers of
the model that ships.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from causeway_server.edge_node.config.schema import EngineConfig
from causeway_server.models.catalog.artifact import Artifact, ArtifactError, find_artifact
from causeway_server.models.llama_cpp.engine import Engine
from causeway_server.models.llama_cpp.native.resources import choose_threads
from causeway_server.models.llama_cpp.protocol import Emission, EngineOptions, Prompt, SequenceRequest
from causeway_server.router.types import Message
from causeway_train.export.quantize import quantize
from tests.bench.decoding.raw import Raw, prompt_of
from tests.bench.decoding.servers import GREEDY, llama_server, our_engine
from tests.models.llama_cpp.tiny_gguf import WORDS, write_tiny_gguf

from .rows import Row

BATCHES = (1, 4, 8, 16)
MANY = 8
PROMPT_TOKENS = 16
ANSWER_TOKENS = 128
RAW_ROUNDS = 15
SERVER_ROUNDS = 7
CALL_ROUNDS = 9
CALLS = 64  # answers a round
COMMANDS = (
    "turn off the lights in the kitchen please",
    "wake me up at six am tomorrow",
    "add another song to the sunday morning playlist",
    "book a table for four people at a highly rated italian restaurant in brooklyn next friday at seven",
    "what's on my calendar for the rest of the week",
    "play the newest track of the rolling stones on spotify",
    "will it be cold in london on monday",
    "remind me to call my mother at noon",
)


def main() -> list[Row]:
    threads = choose_threads(0)
    with _twin() as twin:
        rows = [*_raw_rows(_assistant(twin), threads), *_call_rows(threads)]
        return [*rows, asyncio.run(_server_row(twin, threads))]


@contextlib.contextmanager
def _twin() -> Iterator[Path]:
    """A model of the assistant's shape and quantisation, of random weights: its answers never end by themselves.

    The server cannot be told to go on after an end token, but by a bias, which it applies very slowly.
    """
    with tempfile.TemporaryDirectory() as folder:
        whole, small = Path(folder) / "f32.gguf", Path(folder) / "q4.gguf"
        write_tiny_gguf(whole, width=256, layers=6, heads=4, hidden=768, context=2048, padding=3400)
        quantize(whole, small, "Q4_K_M", threads=1)
        yield small


def _assistant(twin: Path) -> Path:
    """The model that ships, where it is there."""
    try:
        return find_artifact("assistant").path
    except ArtifactError:
        return twin


# --- raw llama_decode -------------------------------------------------------------------------------------------------


def _raw_rows(path: Path, threads: int) -> list[Row]:
    ours, raw = _InProcess(path, threads), Raw(path, threads, max(BATCHES), PROMPT_TOKENS + ANSWER_TOKENS)
    rows = []
    for batch in BATCHES:
        prompts = [prompt_of(number, PROMPT_TOKENS) for number in range(batch)]
        ours.run(batch)
        rounds = [(raw.run(prompts, ANSWER_TOKENS), ours.run(batch)) for _ in range(RAW_ROUNDS)]
        ratio = statistics.median(mine / least for least, mine in rounds)
        note = (
            f"engine {_rate(rounds, 1)} tokens/s, llama_decode {_rate(rounds, 0)} tokens/s; {_count(threads, 'thread')}"
        )
        name = f"{_count(batch, 'stream')}, tokens/s: engine ÷ llama_decode called directly"
        rows.append(Row(name, ratio, "x", 0.85, "higher", note))
    ours.close()
    raw.close()
    return rows


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number > 1 else ''}"


def _rate(rounds: list[tuple[float, float]], side: int) -> str:
    return f"{statistics.median(one[side] for one in rounds):,.0f}"


class _InProcess:
    """The engine, with somebody who only counts ends."""

    def __init__(self, path: Path, threads: int) -> None:
        self._left = 0
        self._done = threading.Event()
        self._next = 0
        options = EngineOptions(model_path=str(path), threads=threads, sequences=max(BATCHES), prefix_cache_bytes=0)
        self._engine = Engine(options, self._emit)
        self._engine.start()

    def run(self, batch: int) -> float:
        """Tokens/s of `batch` answers together."""
        self._left = batch
        self._done.clear()
        jobs = []
        for number in range(batch):
            self._next += 1
            prompt = Prompt(tokens=prompt_of(number, PROMPT_TOKENS))
            jobs.append(
                SequenceRequest(
                    id=self._next, prompt=prompt, max_tokens=ANSWER_TOKENS, sampling=GREEDY, ignore_eos=True
                )
            )
        started = time.perf_counter()
        for job in jobs:
            self._engine.submit(job)
        self._done.wait()
        return batch * ANSWER_TOKENS / (time.perf_counter() - started)

    def close(self) -> None:
        self._engine.close()

    def _emit(self, emissions: list[Emission]) -> None:
        for emission in emissions:
            if emission.finish_reason is not None:
                self._left -= 1
                if not self._left:
                    self._done.set()


# --- calls ------------------------------------------------------------------------------------------------------------


def _call_rows(threads: int) -> list[Row]:
    return [call_row(threads, batch) for batch in (1, MANY, max(BATCHES))]


def call_row(threads: int, batch: int, limit: float | None = None) -> Row:
    """Return what it costs to hold `batch` calls at a time to the words of their utterances."""
    calls = _Calls(find_artifact("assistant"), threads, batch)
    calls.run(held=True)
    rounds = [(calls.run(held=False), calls.run(held=True)) for _ in range(CALL_ROUNDS)]
    calls.close()
    ratio = statistics.median(held / free for free, held in rounds)
    note = f"constrained {_rate(rounds, 1)} tokens/s, unconstrained {_rate(rounds, 0)} tokens/s, prefill included"
    name = f"{_count(batch, 'stream')}, tokens/s: constrained function calls ÷ unconstrained answers"
    return Row(name, ratio, "x", limit, "higher", note)


class _Calls:
    """The device's model, answering commands to their end."""

    def __init__(self, model: Artifact, threads: int, batch: int) -> None:
        self._left = self._made = self._next = 0
        self._done = threading.Event()
        options = EngineOptions(
            model_path=str(model.path),
            threads=threads,
            sequences=batch,
            prefix_cache_bytes=0,
            refuse_token=model.manifest.refuse_token or "",
        )
        self._engine = Engine(options, self._emit)
        self._engine.start()

    def run(self, *, held: bool) -> float:
        """Tokens/s over CALLS answers."""
        self._left, self._made = CALLS, 0
        self._done.clear()
        started = time.perf_counter()
        for number in range(CALLS):
            self._next += 1
            text = COMMANDS[number % len(COMMANDS)]
            prompt, copy_source = Prompt(messages=(Message("user", text),)), text if held else None
            self._engine.submit(
                SequenceRequest(
                    id=self._next, prompt=prompt, max_tokens=ANSWER_TOKENS, sampling=GREEDY, copy_source=copy_source
                )
            )
        self._done.wait()
        return self._made / (time.perf_counter() - started)

    def close(self) -> None:
        self._engine.close()

    def _emit(self, emissions: list[Emission]) -> None:
        for emission in emissions:
            if emission.finish_reason is not None:
                self._made += emission.completion_tokens
                self._left -= 1
        if not self._left:
            self._done.set()


# --- llama_cpp.server ------------------------------------------------------------------------------------------------


async def _server_row(path: Path, threads: int) -> Row:
    prompts = [_text(number) for number in range(MANY)]
    async with our_engine(path, EngineConfig(threads=threads)) as ours, llama_server(path, threads) as server:
        rounds = [
            (await server.run(prompts, ANSWER_TOKENS), await ours.run(prompts, ANSWER_TOKENS))
            for _ in range(SERVER_ROUNDS + 1)
        ][1:]
    mine, theirs = (f"{_rate(rounds, side)} tokens/s" for side in (1, 0))
    note = f"engine {mine}, streamed by its child process; llama_cpp.server {theirs}, whole answers over HTTP"
    ratio = statistics.median(mine / other for other, mine in rounds)
    return Row(f"{MANY} streams, tokens/s: engine ÷ llama_cpp.server", ratio, "x", 1.3, "higher", note)


def _text(number: int) -> str:
    return " ".join(WORDS[(number + 5 * place) % len(WORDS)] for place in range(PROMPT_TOKENS))
