"""What the device's model gets right and wrong: its answers to rows and questions, as its engine gives them, held to
the grammar of calls where its manifest says so.

Right is intent and every argument. A refusal is never right: it is a request to be asked elsewhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from router.types import Confidence

from ...catalog.artifact import Artifact
from ...chat.template import PromptRenderer
from ...evaluate.greedy import Answer, GreedyModel
from ...function_calls.call import parse_call, score_answer
from ...function_calls.dataset import Row
from ...function_calls.grammar import ANSWER_TOKENS, call_grammar
from ...function_calls.intents import OUT_OF_SCOPE

WATCH = 16  # first tokens whose confidence is kept
_PART = 512


class GradedAnswer(msgspec.Struct, frozen=True):
    """A prompt, whether the answer to it was right, and how sure the model was after each of its first tokens."""

    text: str
    right: bool
    own: bool = True  # of the device's domain
    confidences: tuple[Confidence, ...] = ()


def question(text: str) -> Row:
    """A prompt that no function answers."""
    return Row(text=text, intent="oos", source="clinc150", split="question")


def answer_rows(
    model: Artifact, rows: Sequence[Row], folder: Path, *, threads: int = 1, say: Callable[[str], None] = lambda _: None
) -> list[Answer]:
    """The model's greedy answers; kept in `folder`, so that a second call takes up where one ended."""
    folder.mkdir(parents=True, exist_ok=True)
    done: list[Answer] = []
    opened: GreedyModel | None = None
    try:
        for start in range(0, len(rows), _PART):
            part = rows[start : start + _PART]
            told = (model.manifest.sha256, model.manifest.answers, *(row.text for row in part))
            name = hashlib.sha256("\0".join(told).encode())
            path = folder / f"answers-{name.hexdigest()[:16]}.json"
            if not path.is_file():
                opened = opened or GreedyModel(model.path, threads=threads)
                partial = path.with_suffix(".partial")
                partial.write_bytes(msgspec.json.encode(_answers(opened, part, model.manifest.answers == "calls")))
                partial.replace(path)
                say(f"{model.name} has answered {start + len(part)} of {len(rows)} prompts")
            done += msgspec.json.decode(path.read_bytes(), type=list[Answer])
    finally:
        if opened is not None:
            opened.close()
    return done


def is_right(answer: Answer, row: Row) -> bool:
    """Whether the device should have been left alone with this row."""
    return not refuses(answer) and row.split != "question" and score_answer(answer.text, row).exact


def refuses(answer: Answer) -> bool:
    """Its first token is the refusal; the engine ends such an answer there, and the handoff is decided on it."""
    if answer.refuse > 0.5:
        return True
    call = parse_call(answer.text)
    return call is not None and call.name == OUT_OF_SCOPE


def judge(rows: Sequence[Row], answers: Sequence[Answer], own: Callable[[Row], bool]) -> list[GradedAnswer]:
    return [
        GradedAnswer(
            text=row.text,
            right=is_right(answer, row),
            own=row.split != "question" and own(row),
            confidences=answer.confidences[:1] if refuses(answer) else answer.confidences,
        )
        for row, answer in zip(rows, answers, strict=True)
    ]


def _answers(model: GreedyModel, rows: Sequence[Row], held: bool) -> list[Answer]:
    prompter = PromptRenderer(model.chat_template)
    prompts = [model.tokenize(prompter.user(row.text)) for row in rows]
    grammars = [call_grammar(row.text) for row in rows] if held else None
    return model.answers(prompts, ANSWER_TOKENS, grammars, watch=WATCH)
