"""The device model's own answers to rows and questions, graded: the training data of edge.quality and the calibrator.

The answers are made as the engine makes them, constrained to the call grammar if the model's manifest says so. An
answer is correct if the intent and every argument match. A refusal is never correct: the request must be deferred.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from causeway_server.models.catalog.artifact import Artifact
from causeway_server.models.constraints.grammars import ANSWER_TOKENS, call_grammar
from causeway_server.router.types import Confidence

from ..calibrate.routing_curves import Array64
from ..data.prompt_renderer import PromptRenderer
from ..evaluate.greedy import Answer, GreedyModel
from ..function_calls.call import parse_call, score_answer
from ..function_calls.dataset import Row
from ..function_calls.intents import OUT_OF_SCOPE

CONFIDENCE_TOKENS = 16  # number of first tokens whose confidence is recorded
DOMAIN_SHARE = 0.7  # share of in-domain requests in the traffic that probabilities are calibrated for
_CHUNK = 512


class GradedAnswer(msgspec.Struct, frozen=True):
    """A prompt, whether the answer to it was correct, and the confidence after each of its first tokens."""

    text: str
    correct: bool
    in_domain: bool = True  # the prompt is in the device's domain
    confidences: tuple[Confidence, ...] = ()


def question(text: str) -> Row:
    """Return a row for a prompt that no function answers."""
    return Row(text=text, intent="oos", source="clinc150", split="question")


def answer_rows(
    model: Artifact,
    rows: Sequence[Row],
    folder: Path,
    *,
    threads: int = 1,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Answer]:
    """Return the model's greedy answers.

    They are kept in `folder`, so that a second call resumes an interrupted one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    answers: list[Answer] = []
    opened: GreedyModel | None = None
    try:
        for start in range(0, len(rows), _CHUNK):
            chunk = rows[start : start + _CHUNK]
            key = (model.manifest.sha256, model.manifest.answers, *(row.text for row in chunk))
            digest = hashlib.sha256("\0".join(key).encode()).hexdigest()
            path = folder / f"answers-{digest[:16]}.json"
            if not path.is_file():
                opened = opened or GreedyModel(model.path, threads=threads)
                partial = path.with_suffix(".partial")
                partial.write_bytes(msgspec.json.encode(_answers(opened, chunk, model.manifest.answers == "calls")))
                partial.replace(path)
                progress(f"{model.name} has answered {start + len(chunk)} of {len(rows)} prompts")
            answers += msgspec.json.decode(path.read_bytes(), type=list[Answer])
    finally:
        if opened is not None:
            opened.close()
    return answers


def is_correct(answer: Answer, row: Row) -> bool:
    """Return whether the device's answer is correct, so that deferral would gain nothing."""
    return not is_refusal(answer) and row.split != "question" and score_answer(answer.text, row).exact


def is_refusal(answer: Answer) -> bool:
    """Return whether the answer is a refusal; the engine ends such an answer after its first token."""
    if answer.refuse > 0.5:
        return True
    call = parse_call(answer.text)
    return call is not None and call.name == OUT_OF_SCOPE


def grade(rows: Sequence[Row], answers: Sequence[Answer], in_domain: Callable[[Row], bool]) -> list[GradedAnswer]:
    """Grade `answers` to `rows`. Of a refusal only the first confidence is kept, because the handoff decision sees only
    that one.
    """
    return [
        GradedAnswer(
            text=row.text,
            correct=is_correct(answer, row),
            in_domain=row.split != "question" and in_domain(row),
            confidences=answer.confidences[:1] if is_refusal(answer) else answer.confidences,
        )
        for row, answer in zip(rows, answers, strict=True)
    ]


def traffic_weights(graded: Sequence[GradedAnswer]) -> Array64:
    """Return row weights such that in-domain prompts make up DOMAIN_SHARE; they sum to the number of rows."""
    in_domain = np.array([one.in_domain for one in graded])
    if in_domain.all() or not in_domain.any():
        return np.ones(len(in_domain))
    return np.where(in_domain, DOMAIN_SHARE / in_domain.mean(), (1 - DOMAIN_SHARE) / (1 - in_domain.mean()))


def _answers(model: GreedyModel, rows: Sequence[Row], constrained: bool) -> list[Answer]:
    prompter = PromptRenderer(model.chat_template)
    prompts = [model.tokenize(prompter.user(row.text)) for row in rows]
    grammars = [call_grammar(row.text) for row in rows] if constrained else None
    return model.answers(prompts, ANSWER_TOKENS, grammars, confidence_tokens=CONFIDENCE_TOKENS)
