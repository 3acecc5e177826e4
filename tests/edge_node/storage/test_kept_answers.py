"""Which answers of an upstream the exact cache keeps: none that another try would better."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from aiohttp import web

from ..device import Device, running
from ..scripted import ScriptedCloud


class FixedCloud(ScriptedCloud):
    """Answers with this message and finish reason, whole or streamed, and says that it has so many tokens."""

    def __init__(self, message: dict[str, object], finish: str, tokens: int) -> None:
        super().__init__()
        self.message, self.finish, self.tokens = message, finish, tokens

    async def _answer(self, request: web.Request, body: dict[str, object]) -> web.StreamResponse:
        usage = {"prompt_tokens": 7, "completion_tokens": self.tokens, "total_tokens": 7 + self.tokens}
        if not body.get("stream"):
            choice = {"index": 0, "message": {"role": "assistant", **self.message}, "finish_reason": self.finish}
            return web.json_response({"id": "x", "model": "m-large", "choices": [choice], "usage": usage})
        choices = [
            [{"index": 0, "delta": self.message, "finish_reason": None}],
            [{"index": 0, "delta": {}, "finish_reason": self.finish}],
        ]
        events = [{"id": "x", "choices": each} for each in choices] + [{"choices": [], "usage": usage}]
        data = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"
        return web.Response(body=data, content_type="text/event-stream")


async def asked_twice(device: Device, *, stream: bool, max_tokens: int | None) -> str:
    """Ask the same twice; return what the cache had to do with the second answer."""
    for _ in range(2):
        answer = await device.ask(stream=stream, temperature=0, tags="cloud", max_tokens=max_tokens)
        assert answer.status == 200
    return answer.headers["x-causeway-cache"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("message", "finish", "max_tokens"),
    [
        ({"content": "cut at the length of the serv"}, "length", None),
        ({"content": "cut earlier than asked for"}, "length", 100),
        ({"content": ""}, "stop", None),
        ({"content": " \n"}, "stop", None),
        ({"content": None, "refusal": "I cannot help with that."}, "stop", None),
        ({"content": "half of"}, "content_filter", None),
    ],
    ids=["upstream's limit", "a lower limit", "empty", "white space", "refusal", "filtered"],
)
async def test_an_answer_that_another_try_may_better_is_not_replayed(
    tmp_path: Path, message: dict[str, object], finish: str, max_tokens: int | None, stream: bool
) -> None:
    cloud = FixedCloud(message, finish, tokens=9)
    async with running(tmp_path, cloud=cloud) as device:
        assert await asked_twice(device, stream=stream, max_tokens=max_tokens) == "miss"
        assert len(cloud.bodies) == 2


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("finish", "max_tokens"), [("stop", None), ("stop", 100), ("length", 9)])
async def test_a_whole_answer_or_one_of_the_length_asked_for_is_replayed(
    tmp_path: Path, finish: str, max_tokens: int | None, stream: bool
) -> None:
    cloud = FixedCloud({"content": "an answer"}, finish, tokens=9)
    async with running(tmp_path, cloud=cloud) as device:
        assert await asked_twice(device, stream=stream, max_tokens=max_tokens) == "hit"
        assert len(cloud.bodies) == 1
