"""The flows of one client: each is run once, and printed as a line of JSON for the runner.

A flow returns what came back and whether that is what was asked for. An exception is a failure; an object of the right
type with wrong values is `weak`, since the form is ours and the content the model's.
"""

from __future__ import annotations

import asyncio
import json
import sys
import traceback
from collections.abc import Awaitable, Callable
from datetime import date
from decimal import Decimal
from typing import Literal
from uuid import UUID

from pydantic import BaseModel, Field

URL = sys.argv[1] if len(sys.argv) > 1 else ""
ONLY = sys.argv[2] if len(sys.argv) > 2 else ""
EDGE, SCRIPTED = "edge", "scripted"  # targets of the runner's policy
ASK_PERSON = "Ada Lovelace is 36 years old and lives in London. She speaks English."
ASK_TREE = (
    "A file tree: the folder src holds the folder lib and the file main.py; lib holds the file a.py. "
    "A file has no children."
)
ASK_ORDER = (
    "Order 7f1c0b9e-3a52-4f0e-9d0b-2b1f6a4c8d11 of 2026-03-05: 2 apples and 3 pears for 14.50, to be paid by invoice "
    "within 30 days. It is new. The shop is at 52.5, 13.4. The share of our stock is 0.25."
)
ASK_WEATHER = "What is the weather in Paris and in Rome?"
TIMEOUT_S = 600.0
FLOW_TIMEOUT_S = 400.0


class Person(BaseModel):
    """A person of the text."""

    name: str = Field(min_length=1, max_length=40)
    age: int = Field(ge=0, le=130)
    language: Literal["English", "Français", 'other "language"']
    initials: str = Field(pattern=r"^[A-Z]\.[A-Z]\.$")
    city: str | None = Field(default=None, max_length=40)


class Tree(BaseModel):
    """A folder, or a file without children."""

    name: str = Field(max_length=20)
    children: list[Tree] = Field(default=[], max_length=3)


class Card(BaseModel):
    """Payment by card."""

    kind: Literal["card"]
    last_digits: str = Field(pattern=r"\d{4}", max_length=4)


class Invoice(BaseModel):
    """Payment by invoice."""

    kind: Literal["invoice"]
    days: int = Field(multiple_of=10, gt=0, le=90)


class Order(BaseModel):
    """What frameworks make schemas of: formats, unions, maps and tuples."""

    id: UUID
    placed: date
    total: float = Field(ge=0, multiple_of=0.5)
    payment: Card | Invoice = Field(discriminator="kind")
    quantities: dict[str, int] = Field(min_length=1, max_length=4)
    position: tuple[float, float]
    labels: list[Literal["new", "paid", "sent"]] = Field(max_length=3)
    share: float = Field(ge=0, le=1)


class Labels(BaseModel):
    """A set, whose items must differ: nothing holds that."""

    labels: set[str]


class Price(BaseModel):
    """A price in the exact decimals of Python."""

    amount: Decimal = Field(ge=0, decimal_places=2)
    currency: Literal["EUR", "USD"]


class Report(BaseModel):
    """The weather of the first city."""

    city: str
    celsius: int


Result = tuple[object, bool]
Flow = Callable[[], Awaitable[Result]]
_flows: list[tuple[str, str, str, Flow]] = []


def flow(side: str, name: str, *, client_loses: str = "") -> Callable[[Flow], Flow]:
    """Register a flow.

    Args:
        side: The target that answers.
        name: The name of its row.
        client_loses: What the client leaves out of the schema that it sends, so that a valid answer may fail its own
            check. A failure is then a row `client`.
    """

    def register(run: Flow) -> Flow:
        _flows.append((side, name, client_loses, run))
        return run

    return register


def person(found: Person) -> Result:
    """Judge a `Person`. Its form was checked by pydantic."""
    assert isinstance(found, Person), found
    return found.model_dump(), (found.name, found.age, found.city) == ("Ada Lovelace", 36, "London")


def tree(found: Tree) -> Result:
    """Judge a `Tree`."""
    assert isinstance(found, Tree), found
    return found.model_dump(), found.name == "src" and {one.name for one in found.children} == {"lib", "main.py"}


def order(found: Order) -> Result:
    """Judge an `Order`."""
    assert isinstance(found, Order), found
    return found.model_dump(), found.placed == date(2026, 3, 5) and found.payment.kind == "invoice"


def report(found: Report, calls: list[str] | None = None) -> Result:
    """Judge a `Report` of the scripted model, which is exact. `calls`: the cities for which the tool ran, if any."""
    assert isinstance(found, Report), found
    assert (found.city, found.celsius) == ("Paris", 21), found
    return found.model_dump(), _both(calls)


def text(found: str, calls: list[str] | None = None) -> Result:
    """Judge the scripted model's text."""
    assert found == "Paris has 21 degrees, Rome has 25.", found
    return found, _both(calls)


def _both(calls: list[str] | None) -> bool:
    assert calls is None or sorted(calls) == ["Paris", "Rome"], calls
    return True


def run_all() -> None:
    """Run the registered flows one after the other, in one event loop, since clients keep connections."""
    asyncio.run(_run_all())


async def _run_all() -> None:
    for side, name, client_loses, run in _flows:
        if ONLY in f"{side}: {name}":
            row = await _run(run)
            if client_loses and row["verdict"] == "failed":
                row = {"verdict": "client", "found": f"{client_loses} {row['found']}"}
            print(json.dumps({"side": side, "flow": name} | row, default=str), flush=True)


async def _run(run: Flow) -> dict[str, object]:
    try:
        found, right = await asyncio.wait_for(run(), FLOW_TIMEOUT_S)
    except Exception as error:
        traceback.print_exc()
        return {"verdict": "failed", "found": f"{type(error).__name__}: {error}"}
    return {"verdict": "green" if right else "weak", "found": found}
