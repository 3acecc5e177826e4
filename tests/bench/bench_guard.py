"""The guard's detectors: µs of processor time for a text of 500 characters: prose, dense with numbers, with values."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

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
    joined: list[str] = []
    for at, head in enumerate(heads[:TEXTS]):
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


if __name__ == "__main__":
    sys.exit(run_tool(lambda: print(*main(), sep="\n")))
