"""Writes pydantic.json and openapi.json: `python tests/models/constraints/schemas/generate.py` (pydantic 2.14.3).

The schemas are what `model_json_schema` and msgspec's `schema_components` (OpenAPI 3.1) make of the models below;
zod.json is made by generate.mjs. They are kept as files, so that the tests need no generator.
"""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import json
import pathlib
import uuid
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta
from pydantic import BaseModel, ConfigDict, Field, RootModel, conlist, constr

T = TypeVar("T")


class Colour(enum.StrEnum):
    RED = "red"
    GREEN = "green"


class Person(BaseModel):
    name: str
    age: int = Field(ge=0, le=150)
    email: str | None = None


class Node(BaseModel):
    value: str
    children: list[Node] = []


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    breed: str = Field(max_length=20)


class Owner(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    colour: Colour


class Measurement(BaseModel):
    celsius: float = Field(gt=-273.15, lt=1000)
    share: Annotated[float, Field(ge=0, le=1)]
    step: int = Field(multiple_of=5)


class Times(BaseModel):
    at: dt.datetime
    day: dt.date
    hour: dt.time
    took: dt.timedelta


class Ids(BaseModel):
    id: uuid.UUID
    path: pathlib.Path
    code: constr(pattern=r"^[A-Z]{3}-\d{4}$")  # type: ignore[valid-type]


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")
    a: int
    b: tuple[int, str]


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: int


class Maps(BaseModel):
    counts: dict[str, int]
    by_code: dict[constr(pattern=r"^[a-z]+$"), float]  # type: ignore[valid-type]
    anything: dict[str, Any]


class Lists(BaseModel):
    few: conlist(int, min_length=1, max_length=3)  # type: ignore[valid-type]
    pairs: list[tuple[str, float]]
    names: set[str]


class Page(BaseModel, Generic[T]):
    items: list[T] = Field(max_length=5)
    next: str | None


class Step(BaseModel):
    explanation: str
    output: str


class Reasoning(BaseModel):
    steps: list[Step]
    final_answer: str


class Amount(BaseModel):
    value: decimal.Decimal = Field(max_digits=8, decimal_places=2)
    currency: Literal["EUR", "USD"]


class Numbers(RootModel[list[int]]):
    pass


class Alias(BaseModel):
    model_config = ConfigDict(populate_by_name=True)
    from_: str = Field(alias="from", deprecated=True)
    odd: str = Field(alias='a "quoted"\nname', default="x", examples=["y"])


class Query(BaseModel):
    text: Annotated[str, Field(min_length=1, max_length=200, description="What to look for")]
    limit: int | Literal["all"] = 10
    flags: list[Literal["a", "b"]] | None = None


PYDANTIC: tuple[type[BaseModel], ...] = (
    *(Person, Node, Owner, Measurement, Times, Ids, Closed, Open, Maps, Page[Person], Reasoning, Amount, Numbers),
    *(Alias, Query, Cat, Dog, Step, Page[int], Lists),
)


class Address(msgspec.Struct):
    street: Annotated[str, Meta(max_length=60)]
    zip: Annotated[str, Meta(pattern=r"^\d{5}$")]
    country: Literal["DE", "FR", "IT"] = "DE"


class Customer(msgspec.Struct):
    id: Annotated[int, Meta(ge=1)]
    name: str
    address: Address
    tags: Annotated[list[str], Meta(max_length=4)] = []


class Line(msgspec.Struct):
    sku: str
    quantity: Annotated[int, Meta(ge=1, le=99)]
    price: Annotated[float, Meta(ge=0)]


class Order(msgspec.Struct):
    customer: Customer
    lines: list[Line]
    placed: dt.datetime
    note: str | None = None


class Folder(msgspec.Struct):
    name: str
    parent: Folder | None = None


class Card(msgspec.Struct, tag_field="type", tag="card"):
    number: Annotated[str, Meta(min_length=12, max_length=19)]


class Transfer(msgspec.Struct, tag_field="type", tag="transfer"):
    iban: str


class Payment(msgspec.Struct):
    how: Card | Transfer
    amount: Annotated[float, Meta(gt=0)]


class Sensor(msgspec.Struct, rename="camel"):
    device_id: uuid.UUID
    last_seen: dt.date
    readings: dict[str, float]


class Triple(msgspec.Struct, array_like=True):
    a: int
    b: str
    c: bool


class Strict(msgspec.Struct, forbid_unknown_fields=True):
    mode: Colour
    level: int | str | None


class Window(msgspec.Struct):
    start: dt.time
    end: dt.time


class Tree(msgspec.Struct):
    left: Tree | int
    right: Tree | int


class Empty(msgspec.Struct):
    pass


class Mixed(msgspec.Struct):
    value: int | float | str | bool | None
    raw: Any


class Bytes(msgspec.Struct):
    data: bytes


class Choice(msgspec.Struct):
    pick: Literal[1, 2, 3]
    why: Annotated[str, Meta(min_length=1, max_length=80, description="One sentence")]


class Many(msgspec.Struct):
    orders: Annotated[list[Line], Meta(min_length=1, max_length=3)]


class Unique(msgspec.Struct):
    names: set[str]


class Step2(msgspec.Struct):
    every: Annotated[int, Meta(multiple_of=15, ge=0)]


class Pair(msgspec.Struct):
    both: tuple[int, str]


OPENAPI: tuple[type[msgspec.Struct], ...] = (
    *(Address, Customer, Line, Order, Folder, Payment, Sensor, Triple, Strict, Window, Tree, Empty, Mixed, Bytes),
    *(Choice, Many, Unique, Step2, Pair, Card),
)


def main() -> None:
    here = pathlib.Path(__file__).parent
    of_pydantic = {model.__name__: model.model_json_schema() for model in PYDANTIC}
    of_openapi = {}
    for kind in OPENAPI:
        (root,), components = msgspec.json.schema_components([kind], ref_template="#/components/schemas/{name}")
        of_openapi[kind.__name__] = {**root, "components": {"schemas": components}}
    for name, schemas in (("pydantic", of_pydantic), ("openapi", of_openapi)):
        (here / f"{name}.json").write_text(json.dumps(schemas, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
