"""Applications on the boxes: each sends its box short and long commands, a few a second, and counts the answers."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import httpx

SHORT = ("turn on the light", "what time is it", "play some jazz", "stop the music")
LONG = (
    "set an alarm for seven tomorrow morning and another one for half past eight on saturday",
    "remind me to call the dentist on monday at ten and to buy milk on the way home from work",
)
REQUESTS_PER_S = 0.7  # of one box
_LONG_SHARE = 0.3


async def use_box(url: str, seed: int, answers: Counter[int], requests_per_s: float = REQUESTS_PER_S) -> None:
    """Send requests until cancelled. `answers` counts HTTP statuses, 0 for none."""
    rng = random.Random(seed)
    async with httpx.AsyncClient(base_url=url, timeout=20.0) as http:
        while True:
            await asyncio.sleep(rng.expovariate(requests_per_s))
            text = rng.choice(LONG if rng.random() < _LONG_SHARE else SHORT)
            body = {
                "model": "auto",
                "messages": [{"role": "user", "content": text}],
                "temperature": 0,
                "max_tokens": 16,
            }
            try:
                answer = await http.post("/v1/chat/completions", json=body)
                answers[answer.status_code] += 1
            except httpx.HTTPError:
                answers[0] += 1
