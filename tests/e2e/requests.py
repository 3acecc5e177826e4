"""Requests to a stack through the official OpenAI client, and their decision records."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
import urllib3
from openai import OpenAI, Stream
from openai.types.chat import ChatCompletionChunk

SHORT = "wake me up at six am"
LONG = (
    "I have been standing at the counter for quite a while now and I would really like somebody to explain to me, in "
    "as much detail as you possibly can, what the exchange rate between the euro and the dollar is today, and whether "
    "it would be better to wait until next week before I transfer the money from my savings to my checking account"
)
OUTSIDE = "why was my card payment declined"
UNCACHED = 0.7  # a temperature: sampled answers are not cached
LONG_ANSWER: dict[str, Any] = {  # the schema forces any model to give an answer of a known, great length
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "drone", "schema": {"type": "array", "items": {"enum": ["a"]}, "minItems": 400}},
    },
    "max_tokens": 1800,
}


class Answered(msgspec.Struct, frozen=True):
    text: str
    headers: dict[str, str]

    @property
    def route(self) -> str:
        return self.headers["x-causeway-route"]

    @property
    def target(self) -> str:
        return self.headers["x-causeway-target"]

    @property
    def cache(self) -> str:
        return self.headers["x-causeway-cache"]

    @property
    def degraded(self) -> bool:
        return self.headers.get("x-causeway-degraded", "false") not in ("false", "")

    @property
    def id(self) -> str:
        return self.headers["x-causeway-decision"]


def ask(url: str, text: str, *, model: str = "auto", headers: dict[str, str] | None = None, **body: Any) -> Answered:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        raw = client.chat.completions.with_raw_response.create(
            model=model, messages=[{"role": "user", "content": text}], extra_headers=headers, **body
        )
        return Answered(raw.parse().choices[0].message.content or "", dict(raw.headers))


def stream(url: str, text: str, *, model: str = "auto", **body: Any) -> Stream[ChatCompletionChunk]:
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
    return client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": text}], stream=True, **body
    )


def read(chunks: Iterable[ChatCompletionChunk], *, after: int, do: Callable[[], object]) -> Iterator[str]:
    """Yield the text pieces and, last, the finish_reason; call `do` once, after `after` chunks."""
    for number, chunk in enumerate(chunks):
        if number == after:
            do()
        for choice in chunk.choices:
            yield choice.finish_reason or choice.delta.content or ""


def record(url: str, decision_id: str) -> dict[str, Any]:
    return get(f"{url}/v1/decisions/{decision_id}")


def get(url: str) -> Any:
    reply = urllib3.request("GET", url, retries=False)
    assert reply.status == 200, reply.data
    return json.loads(reply.data)
