"""What learned signals and the device's model take, on one thread: µs a text, first token, tokens/s.

Texts are the commands below, each of a length that people use; a figure is the median round of means. The model answers
one stream at a time, through the engine that the daemon runs, with nothing left of a prompt from the time before.
"""

from __future__ import annotations

import gc
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from causeway_server.models.catalog.artifact import (
    Artifact,
    ArtifactError,
    find_artifact,
    find_judged_artifact,
    find_signal,
)
from causeway_server.models.llama_cpp.engine import Engine
from causeway_server.models.llama_cpp.protocol import Emission, EngineOptions, Prompt, SequenceRequest
from causeway_server.models.semantic.index import ENTRIES, SemanticIndex
from causeway_server.models.semantic.judge import Judge
from causeway_server.models.signals.calibration import ConfidenceCalibrator
from causeway_server.models.signals.encoder import SentenceEncoder
from causeway_server.models.signals.quality import QualityEstimator
from causeway_server.router.types import Confidence, Message, Sampling

from .rows import Row, scaled

# Limits, in yardsticks.
ENCODER, QUALITY, FIRST_TOKEN, TOKEN = 10.0, 8.0, 1500.0, 150.0
SEMANTIC = 60.0  # 0.3 ms on a server core of 2024, in the worst case: all questions share their protected words
ROUNDS, CALLS, ANSWERS, ANSWER_TOKENS = 9, 400, 15, 64
TEXTS = (
    "turn off the lights in the kitchen please",
    "wake me up at six am tomorrow",
    "Add another song to the Cita Romántica playlist.",
    "book a table for four people at a highly rated italian restaurant in brooklyn next friday at seven",
    "what's on my calendar for the rest of the week",
    "play the newest track of the rolling stones on spotify",
    "i have been waiting for my new card for over two weeks now, is it still coming",
    "who wrote the novel that the film we saw on sunday was made from",
)
Told = Callable[[str], object]


def main() -> list[Row]:
    return [*_signal_rows(), *_model_rows(find_artifact("assistant"))]


# --- signals ---------------------------------------------------------------------------------------------------------


def _signal_rows() -> list[Row]:
    model = find_artifact("assistant")
    rows = []
    encoder = SentenceEncoder(find_signal("embedding").path)
    rows.append(_row("sentence encoder, a text to its vector", encoder, ENCODER))
    try:
        quality = QualityEstimator(find_signal("edge.quality", model).path)
        rows.append(_row("signal edge.quality of a text", quality, QUALITY))
        calibrator = ConfidenceCalibrator.load(find_signal("confidence", model).path)
        sure = Confidence(8, 0.8, -0.2, 0.7, 0.4, 0.01)
        rows.append(
            _row("calibrator, confidence to probability", lambda _: calibrator(sure, 8, 0.7, ended=False), None)
        )
    except ArtifactError as error:
        print(f"Not all signals are measured: {error}")
    rows.append(_row("look-up in the semantic cache, all 10,000 questions are compared", _semantic_lookup(), SEMANTIC))
    return rows


def _semantic_lookup() -> Told:
    """All entries share the text's protected words, so that each look-up compares all of them."""
    artifact = find_signal("same-answer")
    judge = Judge.load(artifact, find_judged_artifact(artifact))
    index, draw = SemanticIndex(judge), np.random.default_rng(1)
    questions = [question for text in TEXTS if (question := judge.question(text)) is not None]
    for question in questions:
        for number in range(ENTRIES // len(questions)):
            # Near the question, as paraphrases are, so that the judge has candidates.
            vector = question.vector + 0.05 * draw.standard_normal(len(question.vector)).astype(np.float32)
            near = msgspec.structs.replace(
                question,
                signature=questions[0].signature,
                vector=vector / np.linalg.norm(vector),
                words=(*question.words, "also"),
                distinct=question.distinct | {"also"},
            )
            index.add(b"", near, f"{question.words} {number}".encode())

    def look_up(text: str) -> object:
        question = judge.question(text)
        assert question is not None
        return index.find(b"", msgspec.structs.replace(question, signature=questions[0].signature))

    return look_up


def _row(name: str, tell: Told, limit: float | None) -> Row:
    rounds = sorted(_mean_us(tell) for _ in range(ROUNDS))
    note = f"between {rounds[0]:.1f} and {rounds[-1]:.1f} us in rounds of {CALLS} calls"
    return scaled(f"{name}, in yardsticks", statistics.median(rounds), limit, note)


def _mean_us(tell: Told) -> float:
    gc.disable()
    try:
        started = time.perf_counter()
        for number in range(CALLS):
            tell(TEXTS[number % len(TEXTS)])
        return (time.perf_counter() - started) / CALLS * 1e6
    finally:
        gc.enable()


# --- the device's model ----------------------------------------------------------------------------------------------


def _model_rows(model: Artifact) -> list[Row]:
    """On one core: engine and whoever listens to it share it."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        stream = _Stream(model)
        stream.answer(TEXTS[0])
        answers = [stream.answer(TEXTS[number % len(TEXTS)]) for number in range(ANSWERS)]
        held = [stream.answer(TEXTS[number % len(TEXTS)], held=True) for number in range(2 * ANSWERS)]
        stream.close()
    finally:
        os.sched_setaffinity(0, cores)
    firsts, rates = ([one[side] for one in answers] for side in (0, 1))
    told = f"{model.name} {model.manifest.quantisation}, one stream on one core, median of {ANSWERS} answers"
    first, rate = statistics.median(firsts) * 1e3, statistics.median(rates)
    calls = f"median of {2 * ANSWERS} whole calls, constrained to words of the request"
    held_first = statistics.median(one[0] for one in held) * 1e3
    held_rate = statistics.median(one[1] for one in held)
    return [
        scaled(
            "device's model, time to the first token of a function call, in yardsticks",
            held_first * 1e3,
            FIRST_TOKEN,
            calls,
        ),
        scaled("device's model, time per token of a function call, in yardsticks", 1e6 / held_rate, TOKEN, calls),
        scaled(
            "device's model, time to the first token, in yardsticks",
            first * 1e3,
            FIRST_TOKEN,
            f"{told}; the slowest took {_slowest(firsts)}",
        ),
        scaled("device's model, time per token, in yardsticks", 1e6 / rate, TOKEN, told),
    ]


def _slowest(firsts: Sequence[float]) -> str:
    return f"{max(firsts) * 1e3:.1f} ms"


class _Stream:
    """The engine, and when its tokens came."""

    def __init__(self, model: Artifact) -> None:
        self._times: list[float] = []
        self._made = 0
        self._done = threading.Event()
        self._next = 0
        refuse = model.manifest.refuse_token or ""
        options = EngineOptions(
            model_path=str(model.path), threads=1, sequences=1, prefix_cache_bytes=0, refuse_token=refuse
        )
        self._engine = Engine(options, self._emit)
        self._engine.start()

    def answer(self, text: str, *, held: bool = False) -> tuple[float, float]:
        """Seconds to the first token, and tokens/s after it. `held` to the words of the text, as in the daemon."""
        self._times, self._made = [], 0
        self._done.clear()
        self._next += 1
        prompt = Prompt(messages=(Message(role="user", content=text),))
        greedy = Sampling(temperature=0.0)
        copy_source = text if held else None
        job = SequenceRequest(
            id=self._next,
            prompt=prompt,
            max_tokens=ANSWER_TOKENS,
            sampling=greedy,
            copy_source=copy_source,
            ignore_eos=not held,
        )
        started = time.perf_counter()
        self._engine.submit(job)
        self._done.wait()
        return self._times[0] - started, (self._made - 1) / (self._times[-1] - self._times[0])

    def close(self) -> None:
        self._engine.close()

    def _emit(self, emissions: list[Emission]) -> None:
        self._times.append(time.perf_counter())
        for emission in emissions:
            self._made += emission.tokens
            if emission.finish_reason is not None:
                self._done.set()
