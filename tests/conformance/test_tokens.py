"""`/v1/tokenize` and `/v1/detokenize`: vLLM's shapes, and the counts of the models that answer."""

from __future__ import annotations

import pytest

from .shapes import error
from .surface import Surface

pytestmark = [pytest.mark.triton, pytest.mark.engine, pytest.mark.slow]
CLOUD_ONLY = "edge_to_cloud"


def test_a_chat_has_as_many_tokens_as_its_usage_says(surface: Surface) -> None:
    chat = surface.chat_body("wake me up at six am")
    reply = surface.post("/v1/tokenize", {"model": surface.model, "messages": chat["messages"]})
    if surface.name == CLOUD_ONLY:  # a device counts for its own models
        error(reply, 400, code="unsupported_feature", param="model")
        return
    assert reply.status == 200
    assert set(reply.json) == {"count", "max_model_len", "tokens"}
    assert reply.json["count"] == len(reply.json["tokens"]) <= reply.json["max_model_len"]
    assert surface.chat().json["usage"]["prompt_tokens"] == reply.json["count"]


def test_tokens_become_their_text_again(surface: Surface) -> None:
    text = "turn on the light, naïve 42"
    reply = surface.post("/v1/tokenize", {"model": surface.model, "prompt": text})
    if surface.name == CLOUD_ONLY:
        error(reply, 400, code="unsupported_feature", param="model")
        return
    back = surface.post("/v1/detokenize", {"model": surface.model, "tokens": reply.json["tokens"]})
    assert (back.status, set(back.json)) == (200, {"prompt"})
    assert back.json["prompt"].endswith(text)


def test_a_token_beyond_the_vocabulary_is_400(surface: Surface) -> None:
    error(surface.post("/v1/detokenize", {"model": surface.model, "tokens": [10**6]}), 400)


@pytest.mark.parametrize("path", ["/v1/tokenize", "/v1/detokenize"])
def test_what_is_wrong_is_named(surface: Surface, path: str) -> None:
    body = {"prompt": "a"} if path == "/v1/tokenize" else {"tokens": [1]}
    error(surface.post(path, {"model": "nothing", **body}), 404, code="model_not_found", param="model")
    error(surface.post(path, {"model": surface.model, **body, "speed": 1}), 400, param="speed")
    error(surface.post(path, {"model": surface.model}), 400)
