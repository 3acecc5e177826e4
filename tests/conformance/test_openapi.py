"""The served OpenAPI documents against the servers: bodies that fit their schemas, and bodies that do not.

Schemathesis draws them; as everywhere in `make test` the same ones in each run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import jsonschema
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from .surface import EVENT_TYPE, Reply, Surface

pytestmark = [pytest.mark.triton, pytest.mark.engine, pytest.mark.slow]

CHECKS = [status_code_conformance, content_type_conformance, response_headers_conformance, response_schema_conformance]
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
EXAMPLES = 4  # of each operation
_MOST_TOKENS = 2
Document = dict[str, Any]
Case = schemathesis.Case[Any]


@pytest.fixture(scope="session")
def document(surface: Surface) -> Document:
    reply = surface.send("GET", "/openapi.json", headers={"authorization": ""})
    assert reply.status == 200
    found: Document = reply.json
    return found


@pytest.fixture(scope="session")
def session(surface: Surface) -> Iterator[requests.Session]:
    with requests.Session() as opened:
        yield opened


def _operations(document: Document) -> Iterator[tuple[str, str, Document]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def _can_be_wrong(operation: Mapping[str, Any]) -> bool:
    """Whether it takes more than texts, of which each is one."""
    schemas = [parameter["schema"] for parameter in operation.get("parameters", ())]
    return "requestBody" in operation or any(schema != {"type": "string"} for schema in schemas)


def _bounded(case: Case, model: str) -> None:
    """Name a model that exists, and ask for a short answer: an invented name gets no further than a 404."""
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        case.body["model"] = model
        for name in ("max_tokens", "max_output_tokens"):
            case.body[name] = _MOST_TOKENS
        for name in ("max_completion_tokens", "n", "best_of"):
            case.body.pop(name, None)


def _validate(document: Document, schema: Mapping[str, Any], value: object) -> None:
    jsonschema.Draft202012Validator({**schema, "components": document["components"]}).validate(value)


def _check_events(document: Document, content: Mapping[str, Any], body: bytes) -> None:
    """Each event's data has the schema of `x-event`, or is an error's object."""
    schema = {"anyOf": [content["x-event"], {"$ref": "#/components/schemas/ErrorDocument"}]}
    data = [line.removeprefix(b"data: ") for line in body.split(b"\n") if line.startswith(b"data: ")]
    assert data
    for event in data:
        if event != b"[DONE]":
            _validate(document, schema, json.loads(event))


@pytest.mark.parametrize("mode", [*schemathesis.GenerationMode], ids=lambda mode: mode.value)
def test_requests_get_what_the_document_says(
    surface: Surface, document: Document, session: requests.Session, mode: schemathesis.GenerationMode
) -> None:
    """Whether they fit the document or not: a documented status, its content type, its body and its error codes."""
    schema = schemathesis.openapi.from_dict(document, config=schemathesis.Config())
    schema.config.generation.with_security_parameters = False
    headers = {"authorization": f"Bearer {surface.api_key}", **surface.headers}
    statuses: set[int] = set()
    for result in schema.get_all_operations():
        assert isinstance(result, Ok)
        operation = result.ok()
        if operation.path.startswith("/console/") and "." in operation.path:
            continue  # one file of the page is like another
        if mode is schemathesis.GenerationMode.NEGATIVE and not _can_be_wrong(operation.definition.raw):
            continue

        @settings(
            max_examples=EXAMPLES,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=[*HealthCheck],
            phases=[Phase.generate],
        )
        @given(operation.as_strategy(generation_mode=mode))
        def send(case: Case) -> None:
            _bounded(case, surface.model)
            response = case.call(f"http://{surface.host}:{surface.port}", session, headers, timeout=60)
            assert response.status_code != 500, case.as_curl_command()
            case.validate_response(response, checks=CHECKS)
            statuses.add(response.status_code)
            if response.status_code == 200 and EVENT_TYPE in response.headers["content-type"][0]:
                content = case.operation.definition.raw["responses"]["200"]["content"]
                _check_events(document, content[EVENT_TYPE], response.content)

        send()
    assert 400 in statuses, "no request was refused: no test"


def test_answers_fit_their_schemas(surface: Surface, document: Document) -> None:
    """What an invented request seldom gets: whole and streamed answers, with and without logprobs, jobs and lists."""

    def check(method: str, path: str, reply: Reply) -> Any:
        response = document["paths"][path][method]["responses"][str(reply.status)]
        content = response["content"][reply.media_type]
        if reply.media_type == EVENT_TYPE:
            return _check_events(document, content, reply.body)
        _validate(document, content["schema"], reply.json)
        return reply.json

    for stream in (False, True):
        told = {"stream_options": {"include_usage": True}} if stream else {}
        check("post", "/v1/chat/completions", surface.chat(max_tokens=3, stream=stream, logprobs=True, **told))
        check("post", "/v1/completions", surface.complete(max_tokens=3, stream=stream, logprobs=2, echo=not stream))
        response = {"model": surface.model, "input": "hello", "max_output_tokens": 3, "stream": stream}
        check("post", "/v1/responses", surface.post("/v1/responses", response))
    check("post", "/v1/embeddings", surface.embed())
    check("post", "/v1/embeddings", surface.embed(encoding_format="base64"))
    job = check("post", "/v1/jobs", surface.post("/v1/jobs", surface.chat_body(max_tokens=2)))
    check("get", "/v1/jobs/{id}", surface.get(f"/v1/jobs/{job['id']}"))
    check("get", "/v1/jobs", surface.get("/v1/jobs?limit=3"))
    check("get", "/v1/models", surface.get("/v1/models"))
    check("get", "/v1/models/{id}", surface.get(f"/v1/models/{surface.model}"))
    check("get", "/readyz", surface.get("/readyz"))
    if surface.name == "edge":
        check("post", "/v1/route", surface.post("/v1/route", surface.chat_body()))
        (record,) = check("get", "/v1/decisions", surface.get("/v1/decisions?limit=1"))["data"]
        check("get", "/v1/decisions/{id}", surface.get(f"/v1/decisions/{record['id']}"))


def test_other_methods_are_refused_and_the_documented_ones_named(surface: Surface, document: Document) -> None:
    for path, operations in document["paths"].items():
        documented = {method.upper() for method in operations}
        for method in {*METHODS} - documented:
            reply = surface.send(method, path.replace("{id}", "some-id"), b"{}")
            error = reply.json["error"]
            code = error.get("code") or error["details"]["error_code"]  # of Anthropic's paths
            assert (reply.status, code) == (405, "method_not_allowed"), (method, path)
            assert set(reply.headers["allow"].split(", ")) == documented | ({"HEAD"} if "GET" in documented else set())


def test_operations_of_clients_need_a_key_and_no_others(surface: Surface, document: Document) -> None:
    for method, path, operation in _operations(document):
        reply = surface.send(
            method, path.replace("{id}", "some-id"), b"{}" if method == "POST" else None, {"authorization": ""}
        )
        assert (reply.status == 401) == ("security" in operation), (method, path, reply.status)
        if reply.status == 401:
            assert "`invalid_api_key`" in operation["responses"]["401"]["description"]


def test_the_document_follows_the_specification(document: Document) -> None:
    schemathesis.openapi.from_dict(document, config=schemathesis.Config()).validate()
    assert document["openapi"].startswith("3.1")
    assert document["paths"]["/v1/realtime"]["get"]["x-protocol"] == "websocket"
    answer = document["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]["content"]
    assert set(answer) == {"application/json", "text/event-stream"}
