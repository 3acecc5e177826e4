"""HTTP APIs as values: the operations of an API, and the OpenAPI 3.1 document that is made from them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from ..config import describe
from ..errors import CausewayError

JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
FORM: Final = "multipart/form-data"
TEXT: Final = "text/plain"
_IN_PATH: Final = re.compile(r"\{([a-z0-9_]+)\}")


class Parameter(msgspec.Struct, frozen=True):
    """A parameter in the query or a header. `kind` is the type of its value."""

    name: str
    meaning: str
    place: Literal["query", "header"] = "query"
    kind: Any = str
    required: bool = False


class AnyOf(msgspec.Struct, frozen=True):
    """A body of any of the types `kinds`; if `beside` is set, the body must also match that type."""

    kinds: tuple[Any, ...]
    beside: Any = None


class SchemaReference(msgspec.Struct, frozen=True):
    """A type that has a schema of its own in the document, by its name."""

    name: str


class ApiResponse(msgspec.Struct, frozen=True):
    """A successful response. `content`: the type of the body by media type, of an event's data for server-sent events;
    None: any bytes.
    """

    status: int = 200  # the HTTP status
    content: Mapping[str, Any] = {}
    meaning: str = "Success."  # the condition under which it is sent
    headers: Mapping[str, str] = {}  # names of headers, with their meaning


class Operation(msgspec.Struct, frozen=True):
    """An operation of an HTTP API."""

    method: Literal["GET", "POST", "PUT", "DELETE"]
    path: str  # the path, with its parameters in braces, such as ``/v1/jobs/{id}``
    summary: str  # one sentence
    caller: str = "anyone"  # the role, or the scope of the token, that may call it; "anyone" needs no token
    request: Mapping[str, Any] = {}  # the type of the body by media type; empty if there is no body
    parameters: tuple[Parameter, ...] = ()  # the parameters in query and headers; those of the path are in `path`
    responses: tuple[ApiResponse, ...] = (ApiResponse(),)  # the successful responses, at least one
    errors: tuple[type[CausewayError], ...] = ()  # the error classes that it sends
    fault: type[msgspec.Struct] | None = None  # the type of their body; None: OpenAI's
    protocol: str = ""  # the protocol of the connection after its response, such as ``websocket``; "": HTTP


OPENAPI_PATH: Final = "/openapi.json"
_REFERENCE: Final = re.compile(r'"#/components/schemas/([^"]+)"')
_SHORT: Final = re.compile(r'"\$ref":"(\w+)"')
_PREFIX: Final = re.compile(r"^_?(Wire)?")
Schema = dict[str, Any]


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON body of an error. `message` is for people; `code` is stable."""

    code: str
    message: str
    type: str
    param: str | None = None


class ErrorDocument(msgspec.Struct, frozen=True):
    error: ErrorBody


def openapi_document(
    title: str,
    version: str,
    operations: Sequence[Operation],
    bearer: Mapping[str, str],
    *,
    token_optional: bool = False,
    webhooks: Sequence[Operation] = (),
    schemas: Mapping[str, Any] = {},
) -> dict[str, Any]:
    """Return the document of these operations. `bearer`: further fields of the security scheme `bearer`;
    `token_optional`: whether a server may be configured to need no token; `webhooks`: requests to clients, whose paths
    are names; `schemas`: those to which a `SchemaReference` or a `$ref` in them refers by name, or types.
    """
    known = _Schemas([*operations, *webhooks], schemas)

    def by_path(served: Sequence[Operation]) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for one in served:
            found.setdefault(one.path, {})[one.method.lower()] = _operation(one, known, token_optional=token_optional)
        return found

    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        "paths": by_path(operations),
        **({"webhooks": by_path(webhooks)} if webhooks else {}),
        "components": {
            "schemas": known.components,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer", **bearer}},
        },
    }


class _Schemas:
    """The schemas of all types in some operations. A component has its type's name without `_` and `Wire`."""

    def __init__(self, operations: Iterable[Operation], written: Mapping[str, Any]) -> None:
        kinds = [ErrorDocument, *(kind for one in operations for kind in _kinds(one))]
        kinds += [kind for kind in written.values() if not isinstance(kind, dict)]
        found, components = msgspec.json.schema_components(
            kinds, schema_hook=_schema_of_any, ref_template="#/components/schemas/{name}"
        )
        describe(components, kinds)
        names = {name: _PREFIX.sub("", name) for name in components}
        if len({*names.values()}) < len(names):
            raise ValueError(f"Two types have the same name in the document: {sorted(names)}.")
        text = msgspec.json.encode([found, components]).decode()
        text = _REFERENCE.sub(lambda match: f'"#/components/schemas/{names[match[1]]}"', text)
        renamed, components = msgspec.json.decode(text)
        self._by_kind: dict[int, Schema] = {id(kind): schema for kind, schema in zip(kinds, renamed, strict=True)}
        self._kinds = kinds  # kept alive, so that no other type gets one of their ids
        self.components: dict[str, Schema] = {
            names[name]: {**schema, "title": names[name]} for name, schema in components.items()
        }
        own = {name: one | {"title": name} for name, one in written.items() if isinstance(one, dict)}
        text = _SHORT.sub(r'"$ref":"#/components/schemas/\1"', msgspec.json.encode(own).decode())
        self.components |= msgspec.json.decode(text)

    def __getitem__(self, kind: Any) -> Schema:
        if isinstance(kind, AnyOf):
            one = {"anyOf": [self[part] for part in kind.kinds]}
            return one if kind.beside is None else {"allOf": [self[kind.beside], one]}
        if isinstance(kind, SchemaReference):
            return {"$ref": f"#/components/schemas/{kind.name}"}
        return self._by_kind[id(kind)]


def _schema_of_any(kind: type) -> Schema:
    """Return the schema of `object`; msgspec knows all other types of ours, and refuses an empty schema."""
    if kind is object:
        return {"description": "Any value."}
    raise NotImplementedError(kind)


def _kinds(operation: Operation) -> Iterator[Any]:
    yield from (parameter.kind for parameter in operation.parameters)
    if operation.fault is not None:
        yield operation.fault
    for content in (operation.request, *(response.content for response in operation.responses)):
        for kind in content.values():
            parts = (*kind.kinds, kind.beside) if isinstance(kind, AnyOf) else (kind,)
            yield from (part for part in parts if part is not None and not isinstance(part, SchemaReference))


def _operation(operation: Operation, schemas: _Schemas, *, token_optional: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"summary": operation.summary, "x-caller": operation.caller}
    if operation.protocol:
        found["x-protocol"] = operation.protocol
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _IN_PATH.findall(operation.path)
    ]
    parameters += [_parameter(parameter, schemas) for parameter in operation.parameters]
    if parameters:
        found["parameters"] = parameters
    if operation.caller != "anyone":
        found["security"] = [{"bearer": []}, *([{}] if token_optional else [])]
    if operation.request:
        found["requestBody"] = {"required": True, "content": _content(operation.request, schemas)}
    found["responses"] = {str(response.status): _response(response, schemas) for response in operation.responses}
    for status, response in _error_responses(operation, schemas).items():
        found["responses"].setdefault(status, response)
    return found


def _parameter(parameter: Parameter, schemas: _Schemas) -> dict[str, Any]:
    found = {"name": parameter.name, "in": parameter.place, "required": parameter.required}
    described = {"description": parameter.meaning} if parameter.meaning else {}
    return found | {"schema": schemas[parameter.kind]} | described


def _response(response: ApiResponse, schemas: _Schemas) -> dict[str, Any]:
    found: dict[str, Any] = {"description": response.meaning}
    if response.content:
        found["content"] = _content(response.content, schemas)
    if response.headers:
        found["headers"] = {
            name: {"description": meaning, "schema": {"type": "string"}} for name, meaning in response.headers.items()
        }
    return found


def _content(content: Mapping[str, Any], schemas: _Schemas) -> dict[str, Any]:
    """Return the bodies by media type. OpenAPI 3.1 cannot describe events: their data's schema is `x-event`."""
    found: dict[str, Any] = {}
    for media_type, kind in content.items():
        if media_type == EVENTS:
            found[EVENTS] = {} if kind is None else {"x-event": schemas[kind]}
        else:
            found[media_type] = {} if kind is None else {"schema": schemas[kind]}
    return found


def _error_responses(operation: Operation, schemas: _Schemas) -> dict[str, dict[str, Any]]:
    """Return a response for each status. Its description and its schema list the codes."""
    by_status: dict[str, dict[str, None]] = {}
    for error in operation.errors:
        by_status.setdefault(str(error.status), {})[error.code] = None
    fault = operation.fault or ErrorDocument
    return {status: _error_response([*codes], schemas[fault], fault) for status, codes in sorted(by_status.items())}


def _error_response(codes: Sequence[str], schema: Schema, fault: type[msgspec.Struct]) -> dict[str, Any]:
    inner: Schema = {"properties": {"code": {"enum": codes}}}
    if fault is not ErrorDocument:
        inner = {"properties": {"details": {"properties": {"error_code": {"enum": codes}}}}}
    return {
        "description": ", ".join(f"`{code}`" for code in codes),
        "content": {JSON: {"schema": {"allOf": [schema, {"properties": {"error": inner}}]}}},
    }
