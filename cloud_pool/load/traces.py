"""Conversations of a load, from a file or made, and when they begin."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from causeway_server.router.errors import ConfigError

_WORDS = "light door alarm music milk train garden seven morning kitchen weather window table river paper".split()


class Conversation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A user's turns in order, as a line of a trace has them."""

    turns: tuple[str, ...]  # the user's texts; each is sent with the turns and answers before it
    at_s: float | None = None  # beginning in seconds after the load's, in a trace with times of its own
    think_s: float = 0.0  # seconds from an answer to the next turn


def read_trace(path: Path) -> tuple[Conversation, ...]:
    """Read a file of JSON lines. Raises ConfigError, also if only some lines have `at_s`."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}. Name a file with one JSON object per line.") from error
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(msgspec.json.decode(line, type=Conversation))
        except msgspec.DecodeError as error:
            raise ConfigError(f'{path}:{number}: {error}. Write {{"turns": ["…"]}}.') from error
        if not found[-1].turns:
            raise ConfigError(f"{path}:{number}: `turns` is empty. Write at least one turn.")
    if len({one.at_s is None for one in found}) != 1:
        raise ConfigError(f"{path}: write `at_s` in every line, or in none.")
    return tuple(found)


def made(rng: random.Random, turns: int, words: int, think_s: float) -> Conversation:
    """Make a conversation of so many turns of so many words, different from every other one."""
    return Conversation(tuple(" ".join(rng.choices(_WORDS, k=words)) for _ in range(turns)), think_s=think_s)


def arrivals(rng: random.Random, rate_per_s: float, seconds: float) -> Iterator[float]:
    """Yield the times of arrivals of a Poisson process, in seconds after its beginning."""
    at_s = rng.expovariate(rate_per_s)
    while at_s < seconds:
        yield at_s
        at_s += rng.expovariate(rate_per_s)


def schedule(trace: Sequence[Conversation], seconds: float) -> list[tuple[float, Conversation]]:
    """Return the conversations of a trace with times of its own, in order, as far as the load lasts."""
    timed = [(one.at_s, one) for one in trace if one.at_s is not None and one.at_s < seconds]
    return sorted(timed, key=lambda pair: pair[0])
