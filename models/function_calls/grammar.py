"""The GBNF grammar of the calls that can answer one message: arguments contain only words of that message.

The assistants copy their arguments. A small model misreads a long name ("Varney the Varney the Varney …") but copies it
correctly when only the word that follows in the text may follow in the answer. The engines on the device and in the
cloud apply the grammar to every answer of a model whose manifest says `answers: calls`, unless the request constrains
the answer itself.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import msgspec

ANSWER_TOKENS = 256  # more than any call needs that does not repeat itself
MAX_PIECES = 300  # words, marks and spaces of the text; beyond it arguments may have any text
MAX_CHARACTERS = 4000  # likewise
_PIECE = re.compile(r"\w+|\s+|[^\w\s]")
_HEAD = r"""
root ::= "{\"name\":" name ",\"arguments\":" arguments "}"
name ::= "\"" [a-z_0-9]{1,48} "\""
"""
_ARGUMENTS = r"""
arguments ::= "{" (pair ("," pair){0,6})? "}"
pair ::= name ":" (text | list)
list ::= "[" text ("," text){0,3} "]"
"""
# A call whose arguments have any text. Texts and lists are bounded, so that an answer that repeats itself still ends.
ANY_CALL = (
    _HEAD
    + _ARGUMENTS.lstrip()
    + r"""text ::= "\"" ([^"\\\x00-\x1F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4})){0,72} "\""
"""
)


def call_grammar(copy_source: str) -> str:
    """Return a grammar in which a value is a run of words and marks of `copy_source`, with the spaces between them.

    A text that is too long gets `ANY_CALL`. Lone surrogates become question marks, as in prompts.
    """
    if len(copy_source) > MAX_CHARACTERS:
        return ANY_CALL
    pieces = _PIECE.findall(copy_source.encode(errors="replace").decode().strip())
    if len(pieces) > MAX_PIECES:
        return ANY_CALL
    words = _words(pieces)
    if not words:
        return _HEAD + 'arguments ::= "{}"\n'
    return "\n".join([_HEAD.rstrip(), _ARGUMENTS.strip(), 'text ::= "\\"" value "\\""', *_runs(words), ""])


def _words(pieces: Sequence[str]) -> list[tuple[str, str]]:
    """Return (space before it, word or mark) pairs."""
    before = ["", *pieces]
    return [
        (space if space.isspace() else "", piece)
        for space, piece in zip(before, pieces, strict=False)
        if not piece.isspace()
    ]


def _runs(words: Sequence[tuple[str, str]]) -> list[str]:
    """Return the rules for every run of words.

    A rule stands for all positions before which the text is the same (the states of a suffix automaton, at most two
    per word: Blumer et al. 1985), so llama.cpp follows one rule at a time. With a rule per position it would follow
    every occurrence of a word that the text repeats.
    """
    names: dict[tuple[int, ...], str] = {}  # positions of the last word → name of the rule for the words behind it
    rules: list[str] = []

    def alternatives(groups: Mapping[str, Sequence[int]]) -> str:
        return " | ".join(f"{_literal(text)} {name(tuple(positions))}".rstrip() for text, positions in groups.items())

    def name(positions: tuple[int, ...]) -> str:
        if positions == (len(words) - 1,):
            return ""  # nothing follows the last word
        if positions not in names:
            names[positions] = f"w{len(names)}"
            pending.append(positions)
        return names[positions]

    pending: deque[tuple[int, ...]] = deque()
    rules.append("value ::= " + alternatives(_grouped((word, at) for at, (_, word) in enumerate(words))))
    while pending:
        positions = pending.popleft()
        following = _grouped(("".join(words[at + 1]), at + 1) for at in positions if at + 1 < len(words))
        rules.append(f"{names[positions]} ::= ({alternatives(following)})?")
    return rules


def _grouped(occurrences: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for text, at in occurrences:
        groups.setdefault(text, []).append(at)
    return groups


def _literal(piece: str) -> str:
    """Escape `piece` for a JSON string, and quote that for GBNF, which has JSON's escapes."""
    inside = msgspec.json.encode(piece).decode()[1:-1]
    return msgspec.json.encode(inside).decode()
