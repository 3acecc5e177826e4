from __future__ import annotations

from typing import Literal

import msgspec
import pytest

from causeway_server.router.api.document import EVENTS, JSON, AnyOf, ApiResponse, Operation, Parameter, openapi_document
from causeway_server.router.errors import InvalidRequest, ModelNotFound, NotFound


class WireThing(msgspec.Struct):
    size: int
    more: object = None


class Thing(msgspec.Struct):
    name: str


class _Part(msgspec.Struct):
    kind: Literal["part"]


def test_an_operation_as_openapi_writes_it() -> None:
    """Types are components without our prefixes; each status lists its codes; events have their data's schema."""
    one = Operation(
        method="POST",
        path="/things/{id}",
        summary="Make a thing.",
        caller="client",
        request={JSON: AnyOf((_Part,), WireThing)},
        parameters=(Parameter("limit", "At most so many.", kind=int),),
        responses=(ApiResponse(200, {EVENTS: _Part}, "Done.", {"Location": "the thing"}),),
        errors=(InvalidRequest, NotFound, ModelNotFound),
    )
    found = openapi_document("Test", "1", [one], {"bearerFormat": "JWT"}, token_optional=True)
    operation = found["paths"]["/things/{id}"]["post"]
    part, thing = ({"$ref": f"#/components/schemas/{name}"} for name in ("Part", "Thing"))
    assert operation["requestBody"]["content"][JSON]["schema"] == {"allOf": [thing, {"anyOf": [part]}]}
    assert found["components"]["schemas"]["Thing"]["title"] == "Thing"
    assert [(one["name"], one["in"], one["required"]) for one in operation["parameters"]] == [
        ("id", "path", True),
        ("limit", "query", False),
    ]
    assert operation["security"] == [{"bearer": []}, {}]
    assert operation["responses"]["200"]["content"] == {EVENTS: {"x-event": part}}
    assert operation["responses"]["404"]["description"] == "`not_found`, `model_not_found`"
    codes = operation["responses"]["404"]["content"][JSON]["schema"]["allOf"][1]["properties"]["error"]
    assert codes == {"properties": {"code": {"enum": ["not_found", "model_not_found"]}}}
    assert found["components"]["securitySchemes"]["bearer"] == {
        "type": "http",
        "scheme": "bearer",
        "bearerFormat": "JWT",
    }


def test_two_types_of_one_name_are_a_mistake() -> None:
    one = Operation(
        method="POST",
        path="/",
        summary="Both.",
        request={JSON: WireThing},
        responses=(ApiResponse(200, {JSON: Thing}),),
    )
    with pytest.raises(ValueError, match="WireThing"):
        openapi_document("Test", "1", [one], {})
