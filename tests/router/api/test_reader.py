from __future__ import annotations

import msgspec
import pytest

from causeway_server.router.api.document import EVENTS, JSON, AnyOf, ApiResponse, Operation, Parameter, SchemaReference
from causeway_server.router.api.reader import Api, ApiText
from causeway_server.router.errors import CausewayError, InvalidRequest, NotFound

SHARED = """
errors: {any: [InvalidRequest], one: [any, NotFound, here]}
parameters:
  limit: {meaning: At most so many., kind: Count}
  last: {name: Last-Event-ID, meaning: Continue after it., in: header, required: true}
  page: [limit, last]
responses: {later: {status: 202, content: Thing, meaning: Accepted., headers: {Location: the thing}}}
operations:
  /things/{id}:
    POST:
      summary: Make a thing.
      caller: makers
      body: [Thing, Written]
      beside: Thing
      answer: {json: Written, events: any}
      also: [later]
      parameters: [page]
      errors: [one]
"""
OWN = """
errors: {here: [Mine]}
schemas: {Written: {type: object, properties: {of: {$ref: Thing}}}}
"""


class Thing(msgspec.Struct):
    name: str


class Mine(CausewayError, code="mine"):
    """An error of the server."""


def api(*texts: str) -> Api:
    text = ApiText()
    for each in texts:
        text = text.joined(msgspec.yaml.decode(each, type=ApiText))
    types = {"Thing": Thing, "Count": int, "Mine": Mine}
    return Api(text, types, {"makers": "client"})


def test_an_operation_has_what_its_document_and_the_other_one_name() -> None:
    found = api(SHARED, OWN)
    assert found.operations == [
        Operation(
            method="POST",
            path="/things/{id}",
            summary="Make a thing.",
            caller="client",
            request={JSON: AnyOf((Thing, SchemaReference("Written")), Thing)},
            parameters=(
                Parameter("limit", "At most so many.", kind=int),
                Parameter("Last-Event-ID", "Continue after it.", "header", required=True),
            ),
            responses=(
                ApiResponse(200, {JSON: SchemaReference("Written"), EVENTS: None}),
                ApiResponse(202, {JSON: Thing}, "Accepted.", {"Location": "the thing"}),
            ),
            errors=(InvalidRequest, NotFound, Mine),
        )
    ]
    assert found.schemas == {"Thing": Thing, "Written": {"type": "object", "properties": {"of": {"$ref": "Thing"}}}}


def test_a_document_with_an_unknown_field_or_name_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="sumary"):
        api("operations: {/things: {GET: {sumary: All things.}}}")
    with pytest.raises(KeyError, match="Nothing"):
        _ = api("operations: {/things: {GET: {summary: All things., answer: Nothing}}}").operations
