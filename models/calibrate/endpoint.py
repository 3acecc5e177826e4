"""The large model behind any OpenAI endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Self

import httpx2

from router.errors import BackendError

from .answers import ModelAnswer
from .prompts import CalibrationPrompt

_TRIES = 6  # the pauses between them double from a second on: half a minute in all
_TIMEOUT_S = 300.0
_RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})


class EndpointAnswerer:
    """`model` at an endpoint such as ``https://host/v1``. Use as an async context manager.

    Args:
        key: the API key, "" for none.
        pause: sleeps between two tries.
    """

    def __init__(
        self, url: str, model: str, key: str = "", pause: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._url = f"{url.rstrip('/')}/chat/completions"
        self._model = model
        self._pause = pause
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._client = httpx2.AsyncClient(headers=headers, timeout=_TIMEOUT_S)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def answer(self, prompt: CalibrationPrompt) -> ModelAnswer:
        """See `Answerer`. An endpoint that is away or overloaded is asked again for half a minute."""
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt.question}],
            "max_tokens": prompt.answer_tokens,
            "temperature": 0,
        }
        fault = ""
        for attempt in range(_TRIES):
            if attempt:
                await self._pause(2.0 ** (attempt - 1))
            try:
                response = await self._client.post(self._url, json=body)
            except httpx2.HTTPError as error:
                fault = f"{type(error).__name__}: {error}"
                continue
            if response.status_code == 200:
                return _parse(response, self._url)
            fault = f"HTTP {response.status_code}: {response.text[:200]}"
            if response.status_code not in _RETRIED:
                break
        raise BackendError(f"{self._url} does not answer: {fault}", phase="connect")


def _parse(response: httpx2.Response, url: str) -> ModelAnswer:
    """Raise BackendError if the response is no chat completion."""
    try:
        body: Any = response.json()
        choice = body["choices"][0]
        return ModelAnswer(
            text=choice["message"]["content"] or "",
            tokens=int((body.get("usage") or {}).get("completion_tokens") or 0),
            finish_reason=str(choice["finish_reason"]),
        )
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise BackendError(f"{url} sent no chat completion: {response.text[:200]}", phase="stream") from error
