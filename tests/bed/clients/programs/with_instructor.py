"""Flows of instructor: its tool and schema modes, lists and partial objects."""

from __future__ import annotations

from collections.abc import Iterable

import instructor
from flows import (
    ASK_ORDER,
    ASK_PERSON,
    ASK_TREE,
    ASK_WEATHER,
    EDGE,
    SCRIPTED,
    TIMEOUT_S,
    URL,
    Order,
    Person,
    Price,
    Report,
    Result,
    Tree,
    flow,
    order,
    person,
    report,
    run_all,
    tree,
)
from instructor import Mode
from openai import AsyncOpenAI


def client(mode: Mode) -> instructor.AsyncInstructor:
    return instructor.from_openai(
        AsyncOpenAI(base_url=URL, api_key="none", timeout=TIMEOUT_S, max_retries=0), mode=mode
    )


def ask(text: str, model: str, **fields: object) -> dict[str, object]:
    fields = {"temperature": 0, "max_tokens": 300} | fields
    return {"messages": [{"role": "user", "content": text}], "model": model, "max_retries": 0, **fields}


@flow(EDGE, "tools")
async def tools() -> Result:
    return person(await client(Mode.TOOLS).create(response_model=Person, **ask(ASK_PERSON, EDGE)))


@flow(EDGE, "tools, strict")
async def strict_tools() -> Result:
    return person(await client(Mode.TOOLS_STRICT).create(response_model=Person, **ask(ASK_PERSON, EDGE)))


@flow(EDGE, "tools, recursive")
async def recursive_tools() -> Result:
    return tree(await client(Mode.TOOLS).create(response_model=Tree, **ask(ASK_TREE, EDGE)))


@flow(EDGE, "tools, formats and unions")
async def order_tools() -> Result:
    return order(await client(Mode.TOOLS).create(response_model=Order, **ask(ASK_ORDER, EDGE)))


@flow(EDGE, "schema, formats and unions")
async def order_schema() -> Result:
    return order(await client(Mode.JSON_SCHEMA).create(response_model=Order, **ask(ASK_ORDER, EDGE)))


@flow(EDGE, "tools, a decimal", client_loses="For pydantic a decimal is a number or any string.")
async def decimal() -> Result:
    found = await client(Mode.TOOLS).create(response_model=Price, **ask("The book costs 14.50 euros.", EDGE))
    return found.model_dump(), str(found.amount).startswith("14.5")


@flow(EDGE, "tools, partial objects streamed")
async def partial() -> Result:
    pieces = [one async for one in client(Mode.TOOLS).create_partial(response_model=Person, **ask(ASK_PERSON, EDGE))]
    assert len(pieces) > 1, pieces
    return person(Person.model_validate(pieces[-1].model_dump()))


@flow(EDGE, "tools, a list of objects streamed")
async def iterable() -> Result:
    question = ask("Ada Lovelace is 36 and lives in London. Alan Turing is 41 and lives in Wilmslow.", EDGE)
    found = [one async for one in client(Mode.TOOLS).create_iterable(response_model=Person, **question)]
    assert found
    assert all(isinstance(one, Person) for one in found)
    return [one.model_dump() for one in found], [one.age for one in found] == [36, 41]


@flow(EDGE, "schema")
async def schema() -> Result:
    return person(await client(Mode.JSON_SCHEMA).create(response_model=Person, **ask(ASK_PERSON, EDGE)))


@flow(EDGE, "schema, recursive")
async def recursive_schema() -> Result:
    return tree(await client(Mode.JSON_SCHEMA).create(response_model=Tree, **ask(ASK_TREE, EDGE)))


@flow(EDGE, "schema, partial objects streamed")
async def partial_schema() -> Result:
    found = client(Mode.JSON_SCHEMA).create_partial(response_model=Person, **ask(ASK_PERSON, EDGE))
    pieces = [one async for one in found]
    return person(Person.model_validate(pieces[-1].model_dump()))


@flow(SCRIPTED, "JSON mode")
async def json_mode() -> Result:
    return report(await client(Mode.JSON).create(response_model=Report, **ask(ASK_WEATHER, SCRIPTED)))


@flow(SCRIPTED, "JSON in Markdown")
async def markdown() -> Result:
    return report(await client(Mode.MD_JSON).create(response_model=Report, **ask(ASK_WEATHER, SCRIPTED)))


@flow(SCRIPTED, "parallel tools")
async def parallel() -> Result:
    asked = ask(ASK_WEATHER, SCRIPTED)
    found = await client(Mode.PARALLEL_TOOLS).create(response_model=Iterable[Report], **asked)
    return report(next(iter(found)))


@flow(SCRIPTED, "tools, partial objects streamed")
async def scripted_partial() -> Result:
    found = client(Mode.TOOLS).create_partial(response_model=Report, **ask(ASK_WEATHER, SCRIPTED))
    pieces = [one async for one in found]
    return report(Report.model_validate(pieces[-1].model_dump()))


run_all()
