"""The OpenAPI document of the control plane, from the same routes and structs that serve it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from router.api import ApiResponse, Operation, Parameter, openapi_document
from router.errors import CausewayError, OriginNotAllowed, UnsupportedMediaType
from router.serving.responses import JSON

from .routes import ApiRoute

_PATTERN = re.compile(r"\{([a-z0-9_]+):[^}]*\}")


def fleet_document(routes: Sequence[ApiRoute], version: str) -> dict[str, Any]:
    """Return the document.

    Args:
        routes: Every route that is served.
        version: The version of this program.
    """
    return openapi_document("Causeway fleet", version, [_operation(route) for route in routes], {"bearerFormat": "JWT"})


def _operation(route: ApiRoute) -> Operation:
    content: Mapping[str, Any] = {}
    if route.response is not None:
        content = {JSON: route.response}
    elif route.status != 204:
        content = {route.content_type: None}
    responses = [ApiResponse(route.status, content)]
    if "if-none-match" in route.headers:
        responses.append(ApiResponse(304, meaning="Nothing is new."))
    parameters = [Parameter(name, meaning) for name, meaning in route.query.items()]
    parameters += [Parameter(name, meaning, "header") for name, meaning in route.headers.items()]
    return Operation(
        method=route.method,
        path=_PATTERN.sub(r"{\1}", route.path),
        summary=route.summary,
        caller=route.caller,
        request={} if route.request is None else {JSON: route.request},
        parameters=tuple(parameters),
        responses=tuple(responses),
        errors=(*route.errors, *_any_errors(route)),
    )


def _any_errors(route: ApiRoute) -> tuple[type[CausewayError], ...]:
    """Return the errors that a route may send whatever its handler does."""
    page = () if route.method == "GET" else (OriginNotAllowed,)
    return page if route.request is None else (*page, UnsupportedMediaType)
