"""The demo questions of `up`, one for each way a request can be answered, and the table of their results.

`TOUR` is for the assistants that ship, which answer with function calls, `KNOWLEDGE` for general models.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
from rich.table import Table
from rich.text import Text

from causeway import AsyncCauseway, CausewayAPIError, CausewayError, Decision

_LONG = (
    "I went to a cash machine near the station yesterday evening to take out some money for the weekend, and after I "
    "had typed in my number it kept my card and gave nothing back, so please tell me how to get it or a new one"
)


class Question(msgspec.Struct, frozen=True):
    """A demo question. `purpose` says which route it is meant to demonstrate."""

    text: str
    purpose: str
    tags: tuple[str, ...] = ()


TOUR = (
    Question("wake me up at six am", "short and in the device model's domain: answered on the device"),
    Question(_LONG, "long: answered in the cloud"),
    Question(_LONG, "repeated: answered from the cache"),
    Question("why was my card payment declined", "short but outside the device model's domain: handed off"),
    Question("put milk on my shopping list", "private: never leaves the device", ("private",)),
)

_PARAGRAPH = (
    "The Amazon river carries more water than any other river on earth, about a fifth of all the fresh water that "
    "reaches the oceans. It rises in the Andes of Peru, crosses Brazil from west to east, and reaches the Atlantic "
    "after some 6,400 kilometres. During the wet season parts of it are more than 45 kilometres wide, and ocean-going "
    "ships can sail upstream as far as Iquitos. "
    "In one sentence: where does the river rise, and into which ocean does it flow?"
)
_CHOICE = "Which of these is a source of renewable energy? A) coal B) oil C) wind D) natural gas. Answer with a letter."
KNOWLEDGE = (
    Question("What is the capital of France?", "short: answered on the device"),
    Question(_PARAGRAPH, "long: answered in the cloud"),
    Question(_PARAGRAPH, "repeated: answered from the cache"),
    Question("How many legs does a spider have?", "short: small models get it wrong"),
    Question("What is 17 plus 25?", "short arithmetic"),
    Question(_CHOICE, "multiple choice: handed off, if the pair is calibrated, because small models guess"),
    Question("Name one side effect of ibuprofen.", "private: never leaves the device", ("private",)),
)
"""For models that answer with text."""


class Row(msgspec.Struct, frozen=True):
    """The result of one question. `error` is empty if it was answered."""

    question: Question
    decision: Decision
    answer: str = ""
    total_ms: float = 0.0
    error: str = ""


async def ask_all(causeway: AsyncCauseway, questions: tuple[Question, ...] = TOUR) -> AsyncIterator[Row]:
    """Ask the questions one after the other.

    Answers are streamed, to measure the first token, and use temperature 0, because sampled answers are not cached.
    """
    for question in questions:
        yield await _ask(causeway, question)


async def _ask(causeway: AsyncCauseway, question: Question) -> Row:
    try:
        async with await causeway.chat(
            question.text, stream=True, temperature=0.0, max_tokens=64, tags=question.tags
        ) as stream:
            answer = await stream.answer()
    except CausewayAPIError as error:
        return Row(question, error.decision or Decision(), error=f"{error.status} {error.code}: {error.message}")
    except CausewayError as error:
        return Row(question, Decision(), error=str(error))
    return Row(question, answer.decision, answer.text, answer.total_ms)


def render_table(rows: list[Row], width: int) -> Table:
    """Lay out the rows for a terminal of `width` columns.

    Questions and answers are truncated to fit; a narrow terminal shows no answers.
    """
    cells = [_cells(row) for row in rows]
    fixed = [max(len(heading), *(len(row[at]) for row in cells)) for at, heading in enumerate(_FIXED_COLUMNS, start=1)]
    rest = width - sum(fixed) - _GAP * (len(fixed) + 1)
    question = max(12, min(34, rest // 2 if rest >= _ANSWER_WIDTH else rest))
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    table.add_column("question", no_wrap=True, width=question)
    for heading, size in zip(_FIXED_COLUMNS, fixed, strict=True):
        table.add_column(heading, no_wrap=True, width=size, justify="right" if "ms" in heading else "left")
    if rest >= _ANSWER_WIDTH:
        table.add_column("answer", no_wrap=True, width=min(60, rest - question))
    for row in cells:
        table.add_row(*row[: len(table.columns)])
    return table


_FIXED_COLUMNS = ("route", "target", "reason", "first ms", "total ms")  # never truncated
_GAP = 2
_ANSWER_WIDTH = 36  # columns that question and answer need together, else no answers are shown
_ROUTE_STYLES = {"edge": "green", "cloud": "blue", "cache": "yellow"}


def _cells(row: Row) -> list[Text]:
    decision = row.decision
    route = decision.route + (" (degraded)" if decision.degraded else "")
    return [
        Text(row.question.text),
        Text(route, style=_ROUTE_STYLES.get(decision.route, "")),
        Text(decision.target),
        Text(decision.reason),
        Text(_milliseconds(decision.first_token_ms)),
        Text(_milliseconds(row.total_ms or None)),
        Text("failed, see below", style="red") if row.error else Text(" ".join(row.answer.split())),
    ]


def _milliseconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"
