"""The OpenAPI document of the control plane, from the same routes and structs that serve it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from router.errors import CausewayError

from .routes import JSON, ApiRoute

PATH = "/openapi.json"
_PARAMETER = re.compile(r"\{([a-z0-9_]+)(?::[^}]*)?\}")


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """`message` is for people; `code` is stable."""

    code: str
    message: str
    type: str
    param: str | None = None


class ErrorDocument(msgspec.Struct, frozen=True):
    error: ErrorBody


def openapi_document(routes: Sequence[ApiRoute], version: str) -> dict[str, Any]:
    """Return the document (OpenAPI 3.1, whose schemas are JSON Schema 2020-12).

    Args:
        routes: Every route that is served.
        version: The version of this program.
    """
    types = [ErrorDocument]
    types += [kind for route in routes for kind in (route.request, route.response) if kind is not None]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    by_type = {id(kind): schema for kind, schema in zip(types, schemas, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = _PARAMETER.sub(r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, by_type)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Causeway fleet", "version": version},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer", "bearerFormat": "JWT"}},
        },
    }


def _operation(route: ApiRoute, schemas: dict[int, dict[str, Any]]) -> dict[str, Any]:
    operation: dict[str, Any] = {"summary": route.summary, "x-caller": route.caller}
    parameters = [_parameter("path", name, "", required=True) for name in _PARAMETER.findall(route.path)]
    parameters += [_parameter("query", name, meaning) for name, meaning in route.query.items()]
    parameters += [_parameter("header", name, meaning) for name, meaning in route.headers.items()]
    if parameters:
        operation["parameters"] = parameters
    if route.caller != "anyone":
        operation["security"] = [{"bearer": []}]
    if route.request is not None:
        content = {JSON: {"schema": schemas[id(route.request)]}}
        operation["requestBody"] = {"required": True, "content": content}
    success: dict[str, Any] = {"description": "Success."}
    if route.response is not None:
        success["content"] = {JSON: {"schema": schemas[id(route.response)]}}
    elif route.status != 204:
        success["content"] = {route.content_type: {}}
    operation["responses"] = {str(route.status): success, **_error_responses(route.errors, schemas)}
    if "if-none-match" in route.headers:
        operation["responses"]["304"] = {"description": "Nothing is new."}
    return operation


def _error_responses(
    errors: Iterable[type[CausewayError]], schemas: dict[int, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """One response for each status, whose description lists the codes."""
    by_status: dict[str, list[str]] = {}
    for error in errors:
        by_status.setdefault(str(error.status), []).append(error.code)
    content = {JSON: {"schema": schemas[id(ErrorDocument)]}}
    return {
        status: {"description": ", ".join(f"`{code}`" for code in dict.fromkeys(codes)), "content": content}
        for status, codes in sorted(by_status.items())
    }


def _parameter(place: str, name: str, meaning: str, *, required: bool = False) -> dict[str, Any]:
    found = {"name": name, "in": place, "required": required, "schema": {"type": "string"}}
    return found | ({"description": meaning} if meaning else {})
