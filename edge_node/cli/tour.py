"""The few questions that `up` asks, one for each way an answer can go, and the table of what became of them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
from rich.table import Table
from rich.text import Text

from ..sdk.client import AsyncCauseway, CausewayAPIError, CausewayError, Decision

_LONG = (
    "I went to a cash machine near the station yesterday evening to take out some money for the weekend, and after I "
    "had typed in my number it kept my card and gave nothing back, so please tell me how to get it or a new one"
)


class Question(msgspec.Struct, frozen=True):
    text: str
    shows: str  # which way it is meant to go
    tags: tuple[str, ...] = ()


TOUR = (
    Question("wake me up at six am", "short, the device's business"),
    Question(_LONG, "long: to the cloud"),
    Question(_LONG, "the same once more: from the cache"),
    Question("why was my card payment declined", "short, but not the device's business: handed off"),
    Question("put milk on my shopping list", "private: never leaves the device", ("private",)),
)


class Row(msgspec.Struct, frozen=True):
    """What became of one question. `error` is empty when it was answered."""

    question: Question
    decision: Decision
    answer: str = ""
    total_ms: float = 0.0
    error: str = ""


async def ask_all(causeway: AsyncCauseway, questions: tuple[Question, ...] = TOUR) -> AsyncIterator[Row]:
    """One after the other, as streams, so that the first token is seen. Greedy: only such answers are cached."""
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


def table_of(rows: list[Row], width: int) -> Table:
    """For a terminal of `width` columns. Question and answer are cut to fit; a narrow one gets no answers."""
    cells = [_cells(row) for row in rows]
    between = [max(len(heading), *(len(row[at]) for row in cells)) for at, heading in enumerate(_BETWEEN, start=1)]
    rest = width - sum(between) - _GAP * (len(between) + 1)
    question = max(12, min(34, rest // 2 if rest >= _ROOM_FOR_ANSWERS else rest))
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    table.add_column("question", no_wrap=True, width=question)
    for heading, size in zip(_BETWEEN, between, strict=True):
        table.add_column(heading, no_wrap=True, width=size, justify="right" if "ms" in heading else "left")
    if rest >= _ROOM_FOR_ANSWERS:
        table.add_column("answer", no_wrap=True, width=min(60, rest - question))
    for row in cells:
        table.add_row(*row[: len(table.columns)])
    return table


_BETWEEN = ("route", "target", "reason", "first ms", "total ms")
_GAP = 2
_ROOM_FOR_ANSWERS = 36  # columns for question and answer together


def _cells(row: Row) -> list[Text]:
    decision = row.decision
    return [
        Text(row.question.text),
        Text(decision.route + (" (degraded)" if decision.degraded else ""), style=_STYLES.get(decision.route, "")),
        Text(decision.target),
        Text(decision.reason),
        Text(_ms(decision.first_token_ms)),
        Text(_ms(row.total_ms or None)),
        Text("failed, see below", style="red") if row.error else Text(" ".join(row.answer.split())),
    ]


_STYLES = {"edge": "green", "cloud": "blue", "cache": "yellow"}


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"
