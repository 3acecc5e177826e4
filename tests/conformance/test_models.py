"""`GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

import pytest

from .shapes import error, model_object
from .surface import JSON_TYPE, Surface

pytestmark = [pytest.mark.triton, pytest.mark.engine, pytest.mark.slow]


def test_the_list(surface: Surface) -> None:
    reply = surface.get("/v1/models")
    assert (reply.status, reply.media_type) == (200, JSON_TYPE)
    assert set(reply.json) == {"object", "data"}
    assert reply.json["object"] == "list"
    assert surface.get("/v1/models/").json == reply.json
    for item in reply.json["data"]:
        model_object(item)
    names = [item["id"] for item in reply.json["data"]]
    assert surface.model in names
    assert len(names) == len(set(names))


def test_each_listed_model_can_be_fetched(surface: Surface) -> None:
    for item in surface.get("/v1/models").json["data"]:
        reply = surface.get(f"/v1/models/{item['id']}")
        assert reply.status == 200
        assert reply.json == item


@pytest.mark.parametrize("name", ["nothing", "a/b", "%2e%2e", "x" * 300, "%ff"])
def test_an_unknown_model_is_404(surface: Surface, name: str) -> None:
    found = error(surface.get(f"/v1/models/{name}"), 404, code="model_not_found", param="model")
    assert len(found["message"]) < 500


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"])
@pytest.mark.parametrize("name", ["nothing", "gpt-4o", "x" * 256, "small ", "../small"])
def test_an_unknown_model_is_404_wherever_it_is_named(surface: Surface, path: str, name: str) -> None:
    body = {"model": name, "messages": [{"role": "user", "content": "a"}], "prompt": "a", "input": "a"}
    wanted = {"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/v1/embeddings": "input"}[path]
    error(surface.post(path, {key: body[key] for key in ("model", wanted)}), 404, code="model_not_found", param="model")


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/small"])
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_models_cannot_be_changed(surface: Surface, path: str, method: str) -> None:
    reply = surface.send(method, path, b"{}")
    error(reply, 405, code="method_not_allowed")
    assert "GET" in reply.headers["allow"]
