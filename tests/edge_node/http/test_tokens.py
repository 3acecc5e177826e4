"""`/v1/tokenize` and `/v1/detokenize` of the daemon."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ..device import Answer, Device, running

CHAT = [{"role": "user", "content": "one three"}]


async def post(device: Device, path: str, body: Mapping[str, Any], **headers: str) -> Answer:
    async with device.session.post(path, json={"model": "small", **body}, headers=headers) as reply:
        return Answer(reply.status, dict(reply.headers), await reply.read())


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": "one three"}, [1, 3, 5]),
        ({"prompt": "one three", "add_special_tokens": False}, [3, 5]),
        ({"messages": CHAT}, [3, 5]),
        ({"messages": CHAT, "add_special_tokens": False, "add_generation_prompt": True, "tools": []}, [3, 5]),
        ({"model": "auto", "messages": CHAT, "return_token_strs": False}, [3, 5]),
    ],
    ids=["prompt", "bare prompt", "chat", "every field", "auto"],
)
async def test_tokens_come_in_vllm_s_form(device: Device, body: dict[str, Any], tokens: list[int]) -> None:
    answer = await post(device, "/v1/tokenize", body)
    assert answer.json == {"count": len(tokens), "max_model_len": 4096, "tokens": tokens}
    assert answer.headers["x-causeway-target"] == "small"
    assert device.engine.calls == []


async def test_tokens_become_text(device: Device) -> None:
    answer = await post(device, "/v1/detokenize", {"tokens": [3, 1]})
    assert (answer.json, answer.headers["x-causeway-target"]) == ({"prompt": "www w"}, "small")


@pytest.mark.parametrize(
    ("path", "body", "param", "advice"),
    [
        ("/v1/tokenize", {}, "prompt", "Send a text, or a chat"),
        ("/v1/tokenize", {"prompt": "a", "messages": CHAT}, "messages", "Send one of them"),
        ("/v1/tokenize", {"prompt": "a", "tools": []}, "tools", "Send one of them"),
        ("/v1/tokenize", {"prompt": 3}, "prompt", "expected"),
        ("/v1/tokenize", {"messages": []}, "messages", ""),
        ("/v1/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content", "Send the user message's text"),
        ("/v1/tokenize", {"messages": CHAT, "add_special_tokens": True}, "add_special_tokens", "template"),
        ("/v1/tokenize", {"messages": CHAT, "add_generation_prompt": False}, "add_generation_prompt", "Send true"),
        ("/v1/tokenize", {"messages": CHAT, "continue_final_message": True}, "continue_final_message", "Send false"),
        ("/v1/tokenize", {"prompt": "a", "return_token_strs": True}, "return_token_strs", "/v1/detokenize"),
        ("/v1/tokenize", {"messages": CHAT, "chat_template": "{{ x }}"}, "chat_template", "not a known field"),
        ("/v1/detokenize", {}, "tokens", "missing"),
        ("/v1/detokenize", {"tokens": [-1]}, "tokens[0]", ""),
        ("/v1/detokenize", {"tokens": "a"}, "tokens", ""),
        ("/v1/tokenize", {"model": "none", "prompt": "a"}, "model", "none"),
        ("/v1/tokenize", {"model": "large", "prompt": "a"}, "model", "no target on this device"),
        ("/v1/detokenize", {"model": "large", "tokens": [1]}, "model", "no target on this device"),
        (
            "/v1/tokenize",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
            "messages[0].content[0]",
            "tokens of text",
        ),
    ],
)
async def test_what_cannot_be_counted_is_refused_by_name(
    device: Device, path: str, body: dict[str, Any], param: str, advice: str
) -> None:
    answer = await post(device, path, body)
    assert answer.status in (400, 404)
    assert answer.json["error"]["param"] == param
    assert advice in answer.message
    assert answer.message[0] in f"`{answer.message[0].upper()}"


async def test_a_model_that_is_not_ready_is_503(device: Device) -> None:
    device.engine.state = "loading"
    answer = await post(device, "/v1/tokenize", {"prompt": "a"})
    assert (answer.status, answer.code) == (503, "engine_unavailable")


async def test_a_key_is_needed_where_keys_are(tmp_path: Path) -> None:
    from causeway_server.edge_node.config.schema import KeyConfig, ServerConfig

    keyed = ServerConfig(port=0, keys=(KeyConfig(name="a", sha256="0" * 64),))
    async with running(tmp_path, server=keyed) as device:
        for path in ("/v1/tokenize", "/v1/detokenize"):
            assert (await post(device, path, {"prompt": "a"})).status == 401
