"""What real servers answer to bodies that they refuse."""

from __future__ import annotations

from tests.router.anthropic.bodies import REFUSED, body_of

from .conftest import Surface


async def test_every_refused_field_gets_this_dialects_error_with_its_path(surface: Surface) -> None:
    for fields, path in REFUSED:
        body = body_of(fields)
        if body.get("model") == "auto":
            body["model"] = surface.model
        answer = await surface.post(body)
        error = answer.json["error"]
        assert (answer.status, answer.json["type"], error["type"]) == (400, "error", "invalid_request_error"), fields
        assert error["details"]["param"] == path
        assert path.split("[")[0] in error["message"]
        assert answer.json["request_id"] == answer.headers["request-id"]
    assert surface.played.calls == []


async def test_bodies_that_are_no_json_get_this_dialects_error(surface: Surface) -> None:
    for data, status, kind in (
        (b"{", 400, "invalid_request_error"),
        (b"", 400, "invalid_request_error"),
        (b'{"a":"' + b"x" * 20_000_000 + b'"}', 413, "request_too_large"),
    ):
        async with surface.http.post(
            f"{surface.url}/v1/messages", data=data, headers={"content-type": "application/json"}
        ) as response:
            assert (response.status, (await response.json())["error"]["type"]) == (status, kind)
    async with surface.http.post(f"{surface.url}/v1/messages", data=b"{}") as response:
        assert (response.status, (await response.json())["error"]["type"]) == (415, "invalid_request_error")


async def test_an_unknown_model_is_named(surface: Surface) -> None:
    answer = await surface.post(surface.body(model="none"))
    assert (answer.status, answer.json["error"]["type"]) == (404, "not_found_error")
    assert answer.json["error"]["details"] == {"error_code": "model_not_found", "param": "model"}
