"""1,875 questions that two real models answered, in the order of asking: a budget of money, and a promise of quality.

The recorded requests, answers, lengths and confidences are those of tests/bench/pair; the grades come from reference
answers, which are not kept here (`--questions`). The probability that the small model's answer is good enough is that
of fits that did not see the question. The times of day are made up, and so is the price, 0.15 and 0.60 USD a million
tokens of prompts and answers. Five days of 375 questions each have 30 % of the money that all answers of the large
model would cost.

The budget is paced as the daemon does it: the limit of an answer is that of the recorded request (4, 24 or 256
tokens), its expected length is learned from the answers that the cloud gave. There are two hindsights, with the same
estimates of quality. The clairvoyant one knows the day and the true price of each answer; the other one knows the day,
and of each request what was known when it arrived: it plans, and pays, by expected prices. A table says what each part
of this is worth.

The promise sees the questions once, and then again and again in shuffled orders, up to 20,000 requests.

The refit sees pairs that were fitted on 40 % of the questions: on all kinds, or without one or two of the six kinds,
which the device then meets. It gets 600 of the other questions with their labels, in five shuffled orders, and is
measured on the rest. Once the labels are not the grades, but whether the answers agree: what shadow answers tell.
"""

from __future__ import annotations

import argparse
import gzip
import math
import random
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from causeway_server.edge_node.signals.corrections import RefitLabel, propose
from causeway_server.edge_node.signals.lengths import AnswerLengths, length_inputs
from causeway_server.models.catalog.artifact import find_signal
from causeway_server.models.comparison.prompts import EvaluationPrompt, read_prompts
from causeway_server.models.signals.agreement import answers_agree
from causeway_server.models.signals.calibration import Refit
from causeway_server.models.signals.drift import calibration_error
from causeway_server.models.signals.encoder import SentenceEncoder
from causeway_server.router.decision.pacing import Demand, Pacer
from causeway_train.calibrate.fit import (
    Rows,
    Unseen,
    fit_pair,
    golden_answers,
    predict,
    predict_unseen,
    quality_inputs,
    stage_inputs,
)
from causeway_train.calibrate.prompts import AnswerLog, Pair, label
from causeway_train.calibrate.run import as_rows

from . import bench_budget
from .bench_budget import Asked, Day
from .rows import Row
from .simulation.contract import ALLOWED, KEEP, serve

ANSWERS = Path(__file__).parent / "pair" / "answers.jsonl.gz"
TOKENS, DAYS, SHARE, SIZE, SEEDS = 8, 5, 0.3, 20_000, range(20)
FITTED, LABELS, ORDERS = 0.4, 600, range(5)
LEFT_OUT = (), ("trivia_qa",), ("trivia_qa", "gsm8k"), ("mmlu", "commonsense_qa"), ("arc_challenge", "openbook_qa")
INPUT, OUTPUT = 0.15e-6, 0.60e-6  # USD a token


class Graded(NamedTuple):
    enough: float  # probability, cross-fitted
    small: float  # grades
    large: float
    prompt_tokens: float
    tokens: int  # of the large model's answer
    limit: int  # of an answer, tokens
    inputs: tuple[float, ...]  # for the expected length

    def usd(self, tokens: float) -> float:
        return self.prompt_tokens * INPUT + tokens * OUTPUT


Questions = tuple[list[EvaluationPrompt], Rows, np.ndarray, list[int]]  # prompts, rows, agreement, large's tokens


def read(questions: Path) -> Questions:
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
    pairs = [(one.prompt, answers[one.id]) for one in prompts]
    agreed = [answers_agree(question, both.small.text, both.large.text, encoder) for question, both in pairs]
    return prompts, rows, np.array(agreed), [both.large.tokens for _, both in pairs]


def graded(prompts: list[EvaluationPrompt], rows: Rows, tokens: list[int]) -> list[Graded]:
    unseen = predict_unseen(rows, (TOKENS,), 1)
    values = zip(prompts, tokens, unseen.stages[-1].tolist(), rows.small.tolist(), rows.large.tolist(), strict=True)
    return [
        Graded(
            *(enough, small, large, len(one.prompt) / 4, count, one.answer_tokens),
            length_inputs(one.question, one.answer_tokens),
        )
        for one, count, enough, small, large in values
    ]


def refits(rows: Rows, agreed: np.ndarray) -> Iterator[Row]:
    tasks = np.array([row.task for row in rows.answers])
    chosen = np.random.default_rng(1).random(len(rows)) < FITTED
    for left_out in LEFT_OUT:
        name = f"refit, fitted without {' and '.join(left_out)}" if left_out else "refit, fitted on all kinds"
        yield refit(name, rows, chosen & ~np.isin(tasks, left_out), rows.enough)
    yield refit("refit, labels by agreement", rows, chosen, agreed)


def refit(name: str, rows: Rows, chosen: np.ndarray, good: np.ndarray) -> Row:
    """Fit a pair on the chosen rows, correct it by labels of some others, and measure it on the rest."""
    part, rest, truth = rows[np.flatnonzero(chosen)], rows[np.flatnonzero(~chosen)], good[~chosen]
    pair = fit_pair(part, (TOKENS,), 1)
    golden = golden_answers(part, Unseen(pair.quality_unseen, pair.stages_unseen), pair.kinds, 1)
    inputs = quality_inputs(pair.kinds, rest.inputs)
    quality = predict(pair.quality, inputs)
    confidence = predict(pair.stages[0].logit, stage_inputs(rest, TOKENS, quality))
    kinds = np.zeros(len(rest), int)
    if pair.kinds is not None:
        kinds = np.stack([predict(kind, rest.inputs) for kind in pair.kinds.kinds], axis=1).argmax(axis=1)
    odds = [np.log(stated / (1 - stated)) for stated in (quality, confidence)]
    losses, errors, refused = [], [], []
    for seed in ORDERS:
        order = np.random.default_rng(seed).permutation(len(rest))
        labels = [
            RefitLabel(int(kinds[at]), float(odds[0][at]), float(odds[1][at]), bool(truth[at])) for at in order[:LABELS]
        ]
        found, held = propose(labels, golden, None, "bench", 0.0), order[LABELS:]
        refused += [] if isinstance(found, Refit) else [found]
        stated = confidence[held]
        if isinstance(found, Refit):
            stated = np.array([found.confidence(float(confidence[at]), int(kinds[at])) for at in held])
        both = [-np.log(np.where(truth[held], one, 1 - one)).mean() for one in (confidence[held], stated)]
        losses.append(both)
        errors.append([calibration_error(one, truth[held]) for one in (confidence[held], stated)])
    (before, after), (error, corrected) = np.mean(losses, axis=0), np.mean(errors, axis=0)
    note = f"log loss {before:.4f} → {after:.4f}; ECE before {error:.3f}; refused: {', '.join(refused) or 'never'}"
    return Row(f"{name}: ECE of the confidence", float(corrected), "", note=note)


def days(found: list[Graded], count: int = DAYS, most: int | None = None) -> Iterator[tuple[Day, list[Graded]]]:
    """Yield days of the questions in their order; the gain is what the estimates expect, the price the mean's.

    Args:
        most: The longest answer, tokens; None: the request's limit.
    """
    mean = statistics.mean(one.tokens for one in found)
    chance, each = random.Random(1), len(found) // count
    total = sum(one.usd(one.tokens) for one in found)
    shape = [1 + 4 * math.exp(-(((hour - 12) / 4) ** 2)) for hour in range(24)]
    for number in range(count):
        part = found[number * each : (number + 1) * each]
        hours = sorted(hour + chance.random() for hour in chance.choices(range(24), weights=shape, k=each))
        requests = [
            Asked(
                *(hour, 1 - one.enough, 0.0),
                *(one.usd(tokens) for tokens in (mean, one.tokens, one.limit if most is None else most)),
            )
            for hour, one in zip(hours, part, strict=True)
        ]
        yield Day(requests, SHARE * total / count), part


class Lengths:
    """How long an answer is expected to be: `mean` of all answers, as `learned`, or the `true` length."""

    def __init__(self, kind: Literal["mean", "learned", "true"]) -> None:
        self._kind, self._learned = kind, AnswerLengths()
        self.expected: list[float] = []  # prices of the requests so far

    def usd(self, one: Graded, mean_usd: float) -> float:
        tokens = float(one.tokens) if self._kind == "true" else None
        if self._kind == "learned":
            tokens = self._learned.expected(one.inputs)
        self.expected.append(mean_usd if tokens is None else one.usd(min(tokens, one.limit)))
        return self.expected[-1]

    def learn(self, one: Graded) -> None:
        self._learned.learn(one.inputs, one.tokens)


class Paced(NamedTuple):
    """A day's gain as a share of the clairvoyant hindsight's, of the other one's, and of that of spending in order."""

    clairvoyant: float
    known: float
    stopped: float
    spent: float  # share of the budget


def paced(
    found: list[tuple[Day, list[Graded]]], kind: Literal["mean", "learned", "true"], usual: Demand
) -> list[Paced]:
    pacer, lengths, shares = Pacer(usual), Lengths(kind), []
    for number, (day, part) in enumerate(found):
        lengths.expected.clear()
        gained, spent = bench_budget.paced(
            *(day, pacer, str(number)),
            lambda at, day=day, part=part: lengths.usd(part[at], day.requests[at].expected),  # type: ignore[misc]
            lambda at, part=part: lengths.learn(part[at]),  # type: ignore[misc]
        )
        known = [one._replace(actual=usd) for one, usd in zip(day.requests, lengths.expected, strict=True)]
        best, of_known = bench_budget.hindsight(day), bench_budget.hindsight(day._replace(requests=known))
        shares.append(Paced(gained / best, gained / of_known, gained / bench_budget.stopped(day), spent / day.budget))
    return shares


def ablation(found: list[Graded]) -> None:
    """Print what hides behind the difference from hindsight: means of the days after the first one."""
    recorded, loose, free = (list(days(found, most=most)) for most in (None, 1024, 0))
    hours = Counter(int(one.hours) for day, _ in recorded for one in day.requests)
    known = Demand(hours=tuple(hours[hour] / DAYS for hour in range(24)), days=7.0)
    cases: list[tuple[str, list[tuple[Day, list[Graded]]], Literal["mean", "learned", "true"], Demand]] = [
        ("answers of up to 1,024 tokens are reserved, mean length", loose, "mean", Demand()),
        ("the same, true length", loose, "true", Demand()),
        ("nothing is reserved, mean length", free, "mean", Demand()),
        ("nothing is reserved, true length", free, "true", Demand()),
        ("the requests' limits are reserved, mean length", recorded, "mean", Demand()),
        ("the same, the usual day is known", recorded, "mean", known),
        ("the same, all questions in one day", list(days(found, 1)), "mean", Demand()),
        ("the requests' limits are reserved, true length", recorded, "true", Demand()),
        ("the requests' limits are reserved, learned length", recorded, "learned", Demand()),
        ("the same, the usual day is known", recorded, "learned", known),
        ("the same, all questions in one day", list(days(found, 1)), "learned", Demand()),
    ]
    print(f"{'gain of a paced budget / that of hindsight:':58} clairvoyant  as known  spent")
    for name, day, kind, usual in cases:
        means = [
            statistics.mean(values)
            for values in zip(*(paced(day, kind, usual)[1:] or paced(day, kind, usual)), strict=True)
        ]
        print(f"{name:58} {means[0]:11.3f}  {means[1]:8.3f}  {means[3]:5.0%}")


def money(found: list[Graded]) -> list[Row]:
    shares = paced(list(days(found)), "learned", Demand())
    note = "by day " + ", ".join(f"{one.clairvoyant:.3f}" for one in shares)
    clairvoyant, known, stopped, spent = (statistics.mean(values) for values in zip(*shares[1:], strict=True))
    return [
        Row(
            "gain of a paced budget ÷ the gain of clairvoyant hindsight, after the first day",
            clairvoyant,
            "x",
            note=note,
        ),
        Row(
            "gain of a paced budget ÷ the gain of hindsight with the same knowledge",
            known,
            "x",
            0.95,
            "higher",
            f"spent {spent:.0%}",
        ),
        Row(
            "gain of a paced budget ÷ the gain if requests take the money in their order of arrival",
            stopped,
            "x",
            1.1,
            "higher",
        ),
        Row("days over their budget", sum(one.spent > 1.0 for one in shares), "days", 0.0),
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
            f"share of {len(SEEDS)} streams of {SIZE:,} requests in which a promise of {KEEP:.0%} is broken",
            100 * statistics.mean(float(one.is_broken) for one in served),
            "%",
            5.0,
            note=note,
        ),
        Row("quality of the worst of these streams", 100 * (KEEP - max(lost)), "%"),
        Row(
            "share of requests that the device answers under the promise",
            100 * statistics.mean(one.share for one in served),
            "%",
        ),
        Row(
            "share of requests that the device answers with the best fixed threshold instead",
            100 * (len(kept) and int(kept[-1]) + 1) / len(found),
            "%",
        ),
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--questions", type=Path, required=True, help="the questions with their reference answers")


def main(options: argparse.Namespace) -> list[Row]:
    prompts, rows, agreed, tokens = read(options.questions)
    found = graded(prompts, rows, tokens)
    print(f"{len(found)} questions; right: small {statistics.mean(one.small for one in found):.1%}, "
          f"large {statistics.mean(one.large for one in found):.1%}")  # fmt: skip
    ablation(found)
    return [*refits(rows, agreed), *money(found), *promise(found)]
