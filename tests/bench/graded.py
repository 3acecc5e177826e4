"""1,875 questions that two real models answered, in the order of asking: a budget of money, and a promise of quality.

The recorded requests, answers, lengths and confidences are those of tests/bench/pair; the grades come from reference
answers, which are not kept here (`--questions`). The probability that the small model's answer is good enough is that
of fits that did not see the question. The times of day are made up, and so is the price, 0.15 and 0.60 USD a million
tokens of prompts and answers. Five days of 375 questions each have 30 % of the money that all answers of the large
model would cost. Hindsight has the same estimates, and knows the day and its true prices.

The promise sees the questions once, and then again and again in shuffled orders, up to 20,000 requests.
"""

from __future__ import annotations

import argparse
import gzip
import math
import random
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from causeway_server.models.catalog.artifact import find_signal
from causeway_server.models.comparison.prompts import read_prompts
from causeway_server.models.signals.encoder import SentenceEncoder
from causeway_server.router.decision.pacing import Pacer
from causeway_train.calibrate.fit import predict_unseen
from causeway_train.calibrate.prompts import AnswerLog, Pair, label
from causeway_train.calibrate.run import as_rows

from . import bench_budget
from .bench_budget import Asked, Day
from .rows import Row
from .simulation.contract import ALLOWED, KEEP, serve

ANSWERS = Path(__file__).parent / "pair" / "answers.jsonl.gz"
TOKENS, DAYS, SHARE, SIZE, SEEDS = 8, 5, 0.3, 20_000, range(20)
INPUT, OUTPUT = 0.15e-6, 0.60e-6  # USD a token


class Graded(NamedTuple):
    enough: float  # probability, cross-fitted
    small: float  # grades
    large: float
    prompt_tokens: float
    tokens: int  # of the large model's answer


def graded(questions: Path) -> list[Graded]:
    """Return the questions in the order of asking."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "answers.jsonl")
        path.write_bytes(gzip.decompress(ANSWERS.read_bytes()))
        pair = msgspec.json.decode(path.open("rb").readline(), type=Pair)
        with AnswerLog(path, pair) as log:
            answers = dict(log.rows)
    known = {prompt.id: prompt for prompt in read_prompts([questions])}
    prompts = [known[one] for one, pair_answers in answers.items() if one in known and pair_answers.small.confidences]
    encoder = SentenceEncoder(find_signal("embedding", None, ()).path)
    rows = as_rows(label(prompts, answers, encoder), encoder)
    unseen = predict_unseen(rows, (TOKENS,), 1)
    values = zip(prompts, unseen.stages[-1].tolist(), rows.small.tolist(), rows.large.tolist(), strict=True)
    return [Graded(e, s, g, len(one.prompt) / 4, answers[one.id].large.tokens) for one, e, s, g in values]


def days(found: list[Graded]) -> Iterator[tuple[Day, list[Graded]]]:
    """Yield days of the questions in their order; the gain is what the estimates expect."""
    mean = statistics.mean(one.tokens for one in found)
    chance, each = random.Random(1), len(found) // DAYS
    total = sum(one.prompt_tokens * INPUT + one.tokens * OUTPUT for one in found)
    shape = [1 + 4 * math.exp(-(((hour - 12) / 4) ** 2)) for hour in range(24)]
    for number in range(DAYS):
        part = found[number * each : (number + 1) * each]
        hours = sorted(hour + chance.random() for hour in chance.choices(range(24), weights=shape, k=each))
        requests = [
            Asked(hour, 1 - one.enough, 0.0, read + mean * OUTPUT, read + one.tokens * OUTPUT, read + 1024 * OUTPUT)
            for hour, one in zip(hours, part, strict=True)
            for read in (one.prompt_tokens * INPUT,)
        ]
        yield Day(requests, SHARE * total / DAYS), part


def money(found: list[Graded]) -> list[Row]:
    pacer, shares, stops, overruns = Pacer(), [], [], 0
    for number, (day, _) in enumerate(days(found)):
        gained, spent = bench_budget.paced(day, pacer, str(number))
        shares.append(gained / bench_budget.hindsight(day))
        stops.append(gained / bench_budget.stopped(day))
        overruns += spent > day.budget
    note = "by day " + ", ".join(f"{share:.3f}" for share in shares)
    return [
        Row("gain of a paced budget / hindsight's, after the first day", statistics.mean(shares[1:]), "x", note=note),
        Row("the same / in the order of arrival", statistics.mean(stops[1:]), "x"),
        Row("budgets overrun", overruns, "days", 0.0),
    ]


def promise(found: list[Graded]) -> list[Row]:
    bad = np.array([one.large > one.small for one in found])
    confidences = np.array([one.enough for one in found])
    order = np.argsort(-confidences)
    kept = np.flatnonzero(np.cumsum(bad[order]) <= ALLOWED * len(found))
    served = []
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        passes = [np.arange(len(found)), *(rng.permutation(len(found)) for _ in range(SIZE // len(found)))]
        at = np.concatenate(passes)[:SIZE]
        each = zip(confidences[at].tolist(), bad[at].tolist(), strict=True)
        served.append(serve(lambda _, each=each: next(each), SIZE, seed))  # type: ignore[misc]
    lost = [one.shortfalls[0] for one in served]
    first = statistics.mean(float(np.mean(one.wrong[: len(found)])) for one in served)
    note = f"the large model is better in {bad.mean():.1%}; wrong in the first pass {first:.2%}"
    return [
        Row(
            "promise: broken streams",
            100 * statistics.mean(float(one.is_broken) for one in served),
            "%",
            5.0,
            note=note,
        ),
        Row("promise: quality of the worst stream", 100 * (KEEP - max(lost)), "%"),
        Row("promise: share on the device", 100 * statistics.mean(one.share for one in served), "%"),
        Row("the same of the best fixed threshold", 100 * (len(kept) and int(kept[-1]) + 1) / len(found), "%"),
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--questions", type=Path, required=True, help="the questions with their reference answers")


def main(options: argparse.Namespace) -> list[Row]:
    found = graded(options.questions)
    print(f"{len(found)} questions; right: small {statistics.mean(one.small for one in found):.1%}, "
          f"large {statistics.mean(one.large for one in found):.1%}")  # fmt: skip
    return [*money(found), *promise(found)]
