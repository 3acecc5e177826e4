"""Labelled rows as examples of a student: the call that answers a row, and `out_of_scope` for requests to refuse."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ..data.augmentation import Augmenter
from ..data.corpus import Corpus
from ..data.open_ended_prompts import open_ended_prompts
from ..function_calls.call import FunctionCall, expected_call
from ..function_calls.dataset import Row
from ..function_calls.intents import OUT_OF_SCOPE, is_device_row, is_refusable
from .examples import ExampleEncoder
from .teacher import TeacherAnswer
from .trainer import LearnedAnswer

LONGEST = 160  # tokens of a prompt with its answer; longer examples are left out
HELD = 200  # held-back rows whose loss is reported
_QUESTION_CHARACTERS = 160
_COMMON_TOKENS = 1024  # a BPE vocabulary begins with its bytes and its most frequent tokens


class CallExamples(msgspec.Struct, frozen=True):
    """What an adapter learns, held-back examples, and the tokens that share the probability in the loss."""

    learned: list[LearnedAnswer]
    held: list[LearnedAnswer]
    vocabulary: frozenset[int]


def call_examples(corpus: Corpus, student: Path, *, hwu64_repeats: int, refusals: int, seed: int) -> CallExamples:
    """Return the examples of the device's rows.

    Args:
        hwu64_repeats: how often a row of HWU64 is learned: as it is, and with other values of its slots.
        refusals: examples to refuse.
    """
    rows = [row for row in corpus.train if is_device_row(row.source, row.intent)]
    augmenter = Augmenter(rows, seed)
    small = [row for row in rows if row.source == "hwu64"]
    rows += [augmenter.variant(row) for _ in range(hwu64_repeats - 1) for row in small]
    held = [row for row in corpus.validation if is_device_row(row.source, row.intent)]
    chosen = random.Random(seed).sample(held, min(HELD, len(held)))
    with ExampleEncoder(student, LONGEST) as encoder:
        refused = _encoded(encoder, _refused(corpus, refusals, seed), FunctionCall(OUT_OF_SCOPE))
        learned = [example for row in rows for example in _encoded(encoder, [row.text], expected_call(row))]
        unseen = [example for row in chosen for example in _encoded(encoder, [row.text], expected_call(row))]
        common = range(min(_COMMON_TOKENS, encoder.vocabulary))
    answers = (one.answer for one in (*learned, *refused, *unseen))
    return CallExamples([*learned, *refused], unseen, frozenset(common).union(*answers))


def _refused(corpus: Corpus, count: int, seed: int) -> list[str]:
    """Return texts without a function of the device: a tenth open-ended, a tenth questions, the rest rows."""
    draw, tenth = random.Random(seed), count // 10
    rows: Sequence[Row] = [row for row in corpus.train if is_refusable(row.source, row.intent)]
    texts = [row.text for row in draw.sample(rows, min(count - 2 * tenth, len(rows)))]
    questions = draw.sample(corpus.questions, min(tenth, len(corpus.questions)))
    return [*texts, *open_ended_prompts(draw, tenth), *(one[:_QUESTION_CHARACTERS].strip() for one in questions)]


def _encoded(encoder: ExampleEncoder, texts: Sequence[str], call: FunctionCall) -> list[LearnedAnswer]:
    answer = TeacherAnswer(msgspec.json.encode(call).decode(), "stop")
    return [example for text in texts if (example := encoder.encode(text, answer)) is not None]
