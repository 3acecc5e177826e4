"""Random conversations as bodies of `/v1/messages`: tools in loops, blocks, other scripts, spelled control tokens."""

from __future__ import annotations

import random
from typing import Any

MARKS = (
    *("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<|start_header_id|>", "<|eot_id|>", "<|end|>"),
    *("[INST]", "[/INST]", "</s>", "[TOOL_CALLS]", "<start_of_turn>", "<end_of_turn>", "<|tool|>", "<|user|>"),
)
"""Control tokens of the families: a caller's text that spells one is plain text."""
WORDS = (
    *"the kitchen light is on what now 42 3.14 it's don't COPY naïve café Ωμέγα 日本語 привет שלום".split(),
    *("👩\u200d🚀", "e\u0301", "def f(x):\n    return x", "{", "}", '"quoted"', "\\n", "  two  spaces  ", "\t"),
    *("a\r\nb", "\u200b", "<", "|>"),
    *MARKS,
)


def conversation(rng: random.Random, model: str, turns: int = 6) -> dict[str, Any]:
    """Return a body that ends with a message of the user, or with results of tools."""
    tools = [_tool(rng, at) for at in range(rng.randrange(4))]
    messages: list[dict[str, Any]] = []
    for _ in range(rng.randrange(turns)):
        messages.append({"role": "user", "content": _content(rng)})
        if tools and rng.random() < 0.5:
            messages += _step(rng, tools, len(messages))
        messages.append({"role": "assistant", "content": _content(rng)})
    messages.append({"role": "user", "content": _content(rng)})
    if tools and rng.random() < 0.3:
        messages += _step(rng, tools, len(messages))
    body: dict[str, Any] = {"model": model, "max_tokens": 1, "messages": messages}
    if rng.random() < 0.7:
        body["system"] = _content(rng)
    if tools:
        body["tools"] = tools
    return body


def text(rng: random.Random, most: int = 20) -> str:
    """Return words that begin with a letter, since templates may trim and refuse empty texts."""
    return "x" + rng.choice((" ", "", "\n")).join(rng.choice(WORDS) for _ in range(rng.randrange(most)))


def _content(rng: random.Random) -> str | list[dict[str, Any]]:
    if rng.random() < 0.6:
        return text(rng)
    return [{"type": "text", "text": text(rng, 8)} for _ in range(rng.randrange(1, 4))]


def _tool(rng: random.Random, number: int) -> dict[str, Any]:
    names = [f"{rng.choice(('city', 'unit', 'größe'))}{at}" for at in range(rng.randrange(3))]
    schema = {"type": "object", "properties": {name: {"type": "string", "description": text(rng, 5)} for name in names}}
    tool = {"name": f"tool_{number}", "input_schema": schema}
    return tool if rng.random() < 0.3 else {**tool, "description": text(rng)}


def _step(rng: random.Random, tools: list[dict[str, Any]], at: int) -> list[dict[str, Any]]:
    calls = [
        {"type": "tool_use", "id": f"toolu_{at}_{n}", "name": rng.choice(tools)["name"], "input": {"a": text(rng, 4)}}
        for n in range(rng.randrange(1, 4))
    ]
    before = [{"type": "text", "text": text(rng, 5)}] if rng.random() < 0.5 else []
    results = [{"type": "tool_result", "tool_use_id": call["id"], "content": _content(rng)} for call in calls]
    return [{"role": "assistant", "content": [*before, *calls]}, {"role": "user", "content": results}]
