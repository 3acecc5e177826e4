"""The few questions that `up` asks, one for each way an answer can go, and the table of what became of them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
from rich.table import Table
from rich.text import Text

from .client import AsyncCauseway, CausewayAPIError, CausewayError, Decision

_LONG = (
    "I went to a cash machine near the station yesterday evening to take out some money for the weekend, and after I "
    "had typed in my number it kept my card and gave nothing back, so please tell me how to get it or a new one"
)
_ANSWER_LENGTH = 64


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


def table_of(rows: list[Row]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("question", "route", "target", "reason"):
        table.add_column(heading, overflow="fold")
    table.add_column("first token", justify="right", no_wrap=True)
    table.add_column("total", justify="right", no_wrap=True)
    table.add_column("answer", overflow="fold")
    for row in rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: Row) -> list[Text]:
    decision = row.decision
    answer = Text(f"failed: {row.error}", style="red") if row.error else Text(_shortened(row.answer))
    return [
        Text(_shortened(row.question.text, 44)),
        Text(decision.route + (" (degraded)" if decision.degraded else ""), style=_STYLES.get(decision.route, "")),
        Text(decision.target),
        Text(decision.reason),
        Text(_ms(decision.first_token_ms)),
        Text(_ms(row.total_ms or None)),
        answer,
    ]


_STYLES = {"edge": "green", "cloud": "blue", "cache": "yellow"}


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} ms" if value < 100 else f"{value:.0f} ms"


def _shortened(text: str, length: int = _ANSWER_LENGTH) -> str:
    text = " ".join(text.split())
    return text if len(text) <= length else f"{text[: length - 1]}…"
