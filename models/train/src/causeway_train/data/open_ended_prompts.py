"""Prompts that the device's model should refuse: general questions, writing, code, small talk.

Templates with fillers make a few thousand distinct prompts, outside the functions of the device's catalogue.
"""

from __future__ import annotations

import random

import msgspec

from causeway_server.router.documents.data import table_of


class _Prompts(msgspec.Struct, frozen=True):
    """The prompts of `open_ended_prompts.json`.

    Attributes:
        fillers: The texts of each placeholder.
        open_ended: Open-ended tasks: outside the catalogues of both models.
        facts: Factual questions: the large assistant has functions for these (qa_*, translate), the device has none.
    """

    fillers: dict[str, tuple[str, ...]]
    open_ended: tuple[str, ...]
    facts: tuple[str, ...]


_PROMPTS = table_of(__package__, "open_ended_prompts.json", _Prompts)
OPEN_ENDED, FACTS = _PROMPTS.open_ended, _PROMPTS.facts


def open_ended_prompts(draw: random.Random, count: int, templates: tuple[str, ...] = OPEN_ENDED + FACTS) -> list[str]:
    """Return `count` prompts in varied casing and punctuation."""
    return [_restyle(draw, _fill(draw, draw.choice(templates))) for _ in range(count)]


def _fill(draw: random.Random, template: str) -> str:
    for name, fillers in _PROMPTS.fillers.items():
        while f"{{{name}}}" in template:
            template = template.replace(f"{{{name}}}", draw.choice(fillers), 1)
    return template


def _restyle(draw: random.Random, text: str) -> str:
    style = draw.random()
    if style < 0.4:
        return text
    ending = (
        "?" if text.split()[0] in ("what", "who", "how", "why", "when", "is", "do", "can", "should", "are") else "."
    )
    capital = text[:1].upper() + text[1:]
    return capital + ending if style < 0.8 else capital
