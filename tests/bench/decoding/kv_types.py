"""`python -m tests.bench.decoding.kv_types`: keys and values at q8_0 beside f16, on a model of the demonstration.

Memory of the engine's process with a full context, tokens/s of one stream behind a short and a long prompt, and how
many greedy answers stay the same. Prints the rows of the table in docs/explanation/model-figures.md.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import get_args

import msgspec
import psutil

from causeway_server.models.catalog.artifact import find_artifact
from causeway_server.models.llama_cpp.engine import Engine
from causeway_server.models.llama_cpp.protocol import Emission, EngineOptions, KVType, Prompt, SequenceRequest
from causeway_server.router.types import Message, Sampling
from tests.tool import run_tool

from .real_weights import MODEL, TEXT

QUESTIONS = (
    "What is the capital of Australia?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Explain in two sentences why the sky is blue.",
    "List five fruits, one per line.",
    "Translate into French: The train leaves at six in the morning.",
    "What is 17 times 23?",
    "Write a haiku about a lighthouse.",
    "Give me a regular expression for an ISO date.",
    "Name three uses of a heat pump.",
    "What does HTTP status 503 mean?",
    "Write SQL that counts the orders of each customer.",
    "How many legs does a spider have?",
    "Rewrite politely: Send me the file now.",
    "What is the difference between a list and a tuple in Python?",
    "Summarise: the harbour is busy in the morning and empty at night.",
    "Write a bash command that finds files larger than 100 MB.",
    "Who wrote War and Peace?",
    "Is 91 a prime number? Answer yes or no.",
    "Write a limerick about a cat and a keyboard.",
    "What is the boiling point of water at sea level in Fahrenheit?",
)
ANSWER_TOKENS = 48
CONTEXT_TOKENS = 8192
_LONG_WORDS = 30  # repetitions of TEXT: about 2,600 tokens
_TIMEOUT_S = 1800.0


class Measured(msgspec.Struct):
    """Of one type, from a process of its own."""

    answers: list[list[int]]  # tokens
    resting_mb: float
    full_mb: float
    short_tokens_per_s: float
    long_tokens_per_s: float
    prefill_tokens_per_s: float


class _Run:
    """One engine in this process, one job at a time."""

    def __init__(self, options: EngineOptions) -> None:
        self._ended = threading.Event()
        self._times: list[float] = []
        self._emissions: list[Emission] = []
        self.engine = Engine(options, self._emit)
        self.engine.start()

    def _emit(self, emissions: list[Emission]) -> None:
        self._emissions += emissions
        self._times += [time.perf_counter()] * sum(emission.tokens for emission in emissions)
        if any(emission.finish_reason or emission.error for emission in emissions):
            self._ended.set()

    def ask(self, text: str, tokens: int, *, ignore_eos: bool = False) -> tuple[str, float, float]:
        """Return the answer, its tokens/s behind the first token, and the seconds to the first token."""
        self._ended.clear()
        self._times, self._emissions = [], []
        prompt = Prompt(messages=(Message("user", text),))
        started = time.perf_counter()
        self.engine.submit(
            SequenceRequest(
                id=id(prompt),
                prompt=prompt,
                max_tokens=tokens,
                sampling=Sampling(temperature=0.0),
                ignore_eos=ignore_eos,
            )
        )
        if not self._ended.wait(_TIMEOUT_S) or self._emissions[-1].error:
            sys.exit(f"no answer: {self._emissions[-1:]}")
        spent = self._times[-1] - self._times[0]
        speed = (len(self._times) - 1) / spent if spent else 0.0
        return "".join(emission.text for emission in self._emissions), speed, self._times[0] - started


def measure(kv_type: KVType) -> Measured:
    """Load the model with this type and measure it."""
    options = EngineOptions(
        model_path=str(find_artifact(MODEL).path),
        context_tokens=CONTEXT_TOKENS,
        kv_tokens=CONTEXT_TOKENS,
        sequences=1,
        kv_type=kv_type,
        prefix_cache_bytes=0,
        prompt_lookup=False,
    )
    run = _Run(options)
    resting = _rss_mb()
    encode = run.engine.core.vocabulary.encode
    answers, speeds = [], []
    for question in QUESTIONS:
        text, speed, _ = run.ask(question, ANSWER_TOKENS)
        answers.append(encode(text, special=False).tolist())
        speeds.append(speed)
    long = TEXT * _LONG_WORDS
    _, long_speed, first_s = run.ask(long, ANSWER_TOKENS, ignore_eos=True)
    tokens = run.engine.count(Prompt(messages=(Message("user", long),)))
    measured = Measured(answers, resting, _rss_mb(), statistics.median(speeds), long_speed, tokens / first_s)
    run.engine.close()
    return measured


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=get_args(KVType), help="measure one type and print it as JSON")
    only: KVType | None = parser.parse_args().only
    if only is not None:
        print(msgspec.json.encode(measure(only)).decode())
        return 0
    found = {kv_type: _in_process(kv_type) for kv_type in get_args(KVType)}
    for name, one in found.items():
        print(
            f"| {name} | {one.full_mb:.0f} MB ({one.resting_mb:.0f} before) | {one.short_tokens_per_s:.1f} |"
            f" {one.long_tokens_per_s:.1f} | {one.prefill_tokens_per_s:.0f} |"
        )
    pairs = list(zip(found["f16"].answers, found["q8_0"].answers, strict=True))
    same = sum(one == other for one, other in pairs)
    shared = statistics.median(_shared(one, other) for one, other in pairs)
    print(f"{same} of {len(pairs)} answers are the same; in the median {shared:.0%} of their tokens before they differ")
    return 0


def _shared(one: list[int], other: list[int]) -> float:
    """Return which share of the longer answer both begin with."""
    common = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return common / max(1, len(one), len(other))


def _in_process(kv_type: str) -> Measured:
    command = [sys.executable, "-m", "tests.bench.decoding.kv_types", "--only", kv_type]
    answer = subprocess.run(command, capture_output=True, check=True, cwd=Path(__file__).parents[3])
    return msgspec.json.decode(answer.stdout.splitlines()[-1], type=Measured)


def _rss_mb() -> float:
    return float(psutil.Process().memory_info().rss / 1e6)


if __name__ == "__main__":
    sys.exit(run_tool(main))
