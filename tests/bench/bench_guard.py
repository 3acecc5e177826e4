"""The guard's detectors: µs of processor time for a text of 500 characters: prose, dense with numbers, with values.

`python -m tests.bench.bench_guard FILE` measures the prompts of people in a file of JSON lines with "prompt".
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from causeway_server.router.guard.detectors import find
from tests.bed.pii_texts import texts
from tests.tool import run_tool

from .rows import Row

CHARACTERS = 500
CLEAN_LIMIT_US, HIT_LIMIT_US = 20.0, 250.0
TEXTS, ROUNDS = 400, 5
PROSE = (
    "The quarterly review showed that most of our customers prefer the second variant, because it needs less care. ",
    "Die meisten Kundinnen und Kunden bevorzugen die zweite Variante, weil sie abends weniger Aufmerksamkeit braucht. ",
    "La plupart de nos clients préfèrent la deuxième variante, parce qu'elle demande moins d'attention le soir. ",
    "La mayoría de nuestros clientes prefiere la segunda variante, porque por la noche necesita menos atención. ",
    "La maggior parte dei nostri clienti preferisce la seconda variante, perché la sera richiede meno attenzione. ",
    "A maioria dos nossos clientes prefere a segunda variante, porque à noite precisa de menos atenção. ",
)


def main() -> list[Row]:
    clean, hits = of_length(personal=False), of_length(personal=True)
    find("call +49 151 23456789 or (212) 555-0123")  # the metadata is read once
    return [
        Row("guard: prose of 500 characters, p50", p50(prose()), "us", CLEAN_LIMIT_US),
        Row("guard: clean text of 500 characters, dense with numbers, p50", p50(clean), "us", CLEAN_LIMIT_US),
        Row("guard: text of 500 characters with values, p50", p50(hits), "us", HIT_LIMIT_US),
    ]


def prose() -> list[str]:
    """Return texts without numbers, one in each language."""
    return [(sentence * CHARACTERS)[:CHARACTERS] for sentence in PROSE]


def of_length(*, personal: bool) -> list[str]:
    """Return texts of the bed, each joined with clean ones to 500 characters."""
    made = texts(8000, 7, "b")
    filler = [text.text for text in made if not text.values]
    heads = [text.text for text in made if text.values] if personal else filler[::2]
    return _joined(heads[:TEXTS], filler)


def of_people(path: Path) -> list[str]:
    """Return the prompts of a file, each joined with the next ones to 500 characters."""
    prompts = [json.loads(line)["prompt"] for line in path.read_bytes().splitlines()]
    return _joined(prompts, prompts)


def _joined(heads: Sequence[str], filler: Sequence[str]) -> list[str]:
    joined: list[str] = []
    for at, head in enumerate(heads):
        text = head
        while len(text) < CHARACTERS:
            at += 1  # noqa: PLW2901 - walks on through the filler
            text += "\n" + filler[at % len(filler)]
        joined.append(text[: max(CHARACTERS, len(head))])
    return joined


def p50(made: Sequence[str]) -> float:
    """Return the median of the texts' times, each the least of its rounds."""
    times = []
    for text in made:
        best = float("inf")
        for _ in range(ROUNDS):
            began = time.process_time_ns()
            find(text)
            best = min(best, time.process_time_ns() - began)
        times.append(best / 1000.0)
    return sorted(times)[len(times) // 2]


def _main() -> None:
    for path in map(Path, sys.argv[1:]):
        made = of_people(path)
        found = sum(bool(find(text)) for text in made)
        print(
            Row(f"guard: {len(made)} texts of {path.name}, {found} with values, p50", p50(made), "us", CLEAN_LIMIT_US)
        )
    if not sys.argv[1:]:
        print(*main(), sep="\n")


if __name__ == "__main__":
    sys.exit(run_tool(_main))
