"""Operations as YAML documents write them, with types and errors by name → values.

A document has operations by path and method, and what they name: lists of errors, parameters or lists of them, headers,
further responses, and schemas of types that no struct has. `operations.yaml` is what edge and gateway have in common.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from .. import errors
from ..documents.data import table_of
from .document import EVENTS, FORM, JSON, TEXT, AnyOf, ApiResponse, Operation, Parameter, SchemaReference

_MEDIA = {"json": JSON, "events": EVENTS, "form": FORM, "text": TEXT}
_REFERENCE = re.compile(r'"\$ref":"(\w+)"')
_TYPES: Mapping[str, Any] = {"object": dict[str, object], "text": str, "any": None}
Method = Literal["GET", "POST", "DELETE"]
Content = str | list[str] | dict[str, str | list[str]]
"""A type by its name, a list of alternatives, or either by media type."""


class _Written(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"place": "in"}):
    """A part of a document. The parts have no fields of their own."""


class _Parameter(_Written, frozen=True):
    """A parameter; `name` is needed if it is not the part's own. `kind`: the name of its type."""

    meaning: str
    place: Literal["query", "header"] = "query"
    kind: str = "text"
    name: str = ""
    required: bool = False


class _Response(_Written, frozen=True):
    status: int
    content: Content = {}
    meaning: str = "Success."
    headers: dict[str, str] = {}


class _Operation(_Written, frozen=True):
    summary: str
    caller: str = "anyone"  # the name of the callers
    body: Content = {}  # the request's body; JSON by default. `beside`: a type that it must match, too.
    beside: str = ""
    status: int | None = 200  # the status of success; None: the operation never succeeds
    answer: Content = {}  # the body of success. `headers`: the name of its headers. `also`: names of further responses.
    meaning: str = "Success."
    headers: str | dict[str, str] = {}
    also: list[str] = []
    parameters: list[str] = []  # names of parameters. `errors`: names of errors and of lists of them.
    errors: list[str] = []
    fault: str = ""  # the name of the type of errors
    protocol: str = ""


class ApiText(_Written, frozen=True):
    """A document as it is written; the parts of two documents can be joined."""

    errors: dict[str, list[str]] = {}
    parameters: dict[str, _Parameter | list[str]] = {}
    headers: dict[str, dict[str, str]] = {}
    responses: dict[str, _Response] = {}
    operations: dict[str, dict[Method, _Operation]] = {}
    webhooks: dict[str, dict[Method, _Operation]] = {}
    schemas: dict[str, dict[str, Any]] = {}

    def joined(self, other: ApiText) -> ApiText:
        """Return both documents as one; the parts of `other` come last."""
        return ApiText(*(getattr(self, name) | getattr(other, name) for name in self.__struct_fields__))

    def meanings(self, group: str) -> dict[str, str]:
        """Return the meaning of each parameter in a list of them."""
        names = self.parameters[group]
        found = {name: self.parameters[name] for name in names} if isinstance(names, list) else {}
        return {name: one.meaning for name, one in found.items() if isinstance(one, _Parameter)}


def read_api(package: str, name: str) -> ApiText:
    """Read a document from a package. Raises msgspec.ValidationError for a part that is written wrongly."""
    return table_of(package, name, ApiText)


class Api:
    """The operations of a document. `types`: the types and error classes that it names, but for `router.errors`;
    `callers`: callers by their names in the document; others stand for themselves.
    """

    def __init__(self, text: ApiText, types: Mapping[str, Any], callers: Mapping[str, str]) -> None:
        self._text, self._callers = text, callers
        self._types = {**_TYPES, **types}

    @property
    def operations(self) -> list[Operation]:
        return [*self._all(self._text.operations)]

    @property
    def schemas(self) -> dict[str, Any]:
        """The types that the document's schemas refer to, by name, and the schemas, instead of types."""
        names = dict.fromkeys(_REFERENCE.findall(msgspec.json.encode(self._text.schemas).decode()))
        return {name: self._types[name] for name in names if name not in self._text.schemas} | self._text.schemas

    @property
    def webhooks(self) -> list[Operation]:
        return [*self._all(self._text.webhooks)]

    def _all(self, paths: Mapping[str, Mapping[Method, _Operation]]) -> Iterator[Operation]:
        for path, methods in paths.items():
            for method, written in methods.items():
                yield self._operation(method, path, written)

    def _operation(self, method: Method, path: str, written: _Operation) -> Operation:
        headers = self._text.headers[written.headers] if isinstance(written.headers, str) else written.headers
        responses = [self._response(self._text.responses[name]) for name in written.also]
        if written.status is not None:
            responses.insert(0, ApiResponse(written.status, self._content(written.answer), written.meaning, headers))
        return Operation(
            method=method,
            path=path,
            summary=written.summary,
            caller=self._callers.get(written.caller, written.caller),
            request=self._content(written.body, written.beside),
            parameters=tuple(self._parameters_of(written.parameters)),
            responses=tuple(responses),
            errors=tuple(self._errors_of(written.errors)),
            fault=self._types[written.fault] if written.fault else None,
            protocol=written.protocol,
        )

    def _response(self, written: _Response) -> ApiResponse:
        return ApiResponse(written.status, self._content(written.content), written.meaning, written.headers)

    def _content(self, content: Content, beside: str = "") -> dict[str, Any]:
        by_media = content if isinstance(content, dict) else {"json": content}
        return {_MEDIA.get(media, media): self._kind(names, beside) for media, names in by_media.items()}

    def _kind(self, names: str | Sequence[str], beside: str = "") -> Any:
        if isinstance(names, str):
            return SchemaReference(names) if names in self._text.schemas else self._types[names]
        return AnyOf(tuple(map(self._kind, names)), self._types[beside] if beside else None)

    def _parameters_of(self, names: Iterable[str]) -> Iterator[Parameter]:
        for name in names:
            written = self._text.parameters[name]
            if isinstance(written, list):
                yield from self._parameters_of(written)
            else:
                kind = self._types[written.kind]
                yield Parameter(written.name or name, written.meaning, written.place, kind, written.required)

    def _errors_of(self, names: Iterable[str]) -> Iterator[type[errors.CausewayError]]:
        for name in names:
            if name in self._text.errors:
                yield from self._errors_of(self._text.errors[name])
            else:
                yield self._types[name] if name in self._types else getattr(errors, name)
