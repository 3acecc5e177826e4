"""`python -m tests.bench dialects`: CPU time of a Messages request over that of a chat request, at edge and gateway.

The upstreams are scripted, and both dialects get the same answers from the same process: a whole one of one token, and
a stream of 64. In each round all take turns; each ratio is the median of the rounds' own.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import msgspec

from .rows import Row
from .streaming.load import CHAT, MESSAGES, Plan, Server
from .streaming.run import edge, gateway, median, play, server

PARALLEL, TOKENS, TIMES = 32, 64, 8
MAX_OF_CHAT = 1.15


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=15)


def main(arguments: argparse.Namespace) -> list[Row]:
    with server("upstream", "upstream") as upstream, edge(upstream.port) as one:
        rows = list(_rows(one, "large", arguments.rounds))
    with server("triton", "triton") as triton, gateway(triton.port) as one:
        return rows + list(_rows(one, "assistant-large", arguments.rounds))


def _rows(one: Server, model: str, rounds: int) -> Iterator[Row]:
    forms = {"whole": {"whole": True, "tokens": 1, "times": TIMES}, f"{TOKENS} tokens streamed": {"tokens": TOKENS}}
    contestants = tuple(
        msgspec.structs.replace(one, name=f"{form} {path}", path=path, **fields)
        for form, fields in forms.items()
        for path in (CHAT, MESSAGES)
    )
    played = play(Plan(contestants, model, PARALLEL, TOKENS, rounds))
    for form in forms:
        chat, message = (f"{form} {path}" for path in (CHAT, MESSAGES))
        ratio = median(played, lambda r: r[message].cpu_ms / r[chat].cpu_ms)  # noqa: B023
        us = [1e3 * median(played, lambda r: r[name].cpu_ms) for name in (message, chat)]  # noqa: B023
        note = f"{us[0]:.0f} and {us[1]:.0f} us"
        yield Row(f"{one.name}: CPU of a Messages request / a chat request, {form}", ratio, "x", MAX_OF_CHAT, note=note)
