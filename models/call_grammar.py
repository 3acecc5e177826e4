"""The grammar (GBNF) of the calls that can answer one utterance: arguments hold nothing but the utterance's own words.

The assistants copy arguments. A model that would misread a long name on its own ("Varney the Varney the Varney …")
copies it right when only what follows in the text may follow in the answer.
"""

from __future__ import annotations

import re

import msgspec

from .greedy import GRAMMAR

MOST_PIECES = 300  # of an utterance; beyond that any text is allowed
_PIECE = re.compile(r"\w+|\s+|[^\w\s]")
_HEAD = r"""
root ::= "{\"name\":" name ",\"arguments\":" arguments "}"
name ::= "\"" [a-z_0-9]{1,48} "\""
"""
_ARGUMENTS = r"""
arguments ::= "{" (pair ("," pair){0,6})? "}"
pair ::= name ":" (text | list)
list ::= "[" text ("," text){0,3} "]"
text ::= "\"" value "\""
"""


def call_grammar(utterance: str) -> str:
    """A value is one or more of the utterance's words and marks in a row, with the space between them as it stands."""
    pieces = _PIECE.findall(utterance.strip())
    if len(pieces) > MOST_PIECES:
        return GRAMMAR
    words = [at for at, piece in enumerate(pieces) if not piece.isspace()]
    if not words:
        return _HEAD + 'arguments ::= "{}"\n'
    rules = [_rule(pieces, at) for at in words]
    starts = " | ".join(f"w{at}" for at in words)
    return "\n".join([_HEAD.rstrip(), _ARGUMENTS.strip(), f"value ::= {starts}", *rules, ""])


def _rule(pieces: list[str], at: int) -> str:
    """From the piece at `at` on: it alone, or with what follows."""
    word = f"w{at} ::= {_literal(pieces[at])}"
    if at + 1 == len(pieces):
        return word
    if pieces[at + 1].isspace():
        return f"{word} ({_literal(pieces[at + 1])} w{at + 2})?"
    return f"{word} w{at + 1}?"


def _literal(piece: str) -> str:
    """As it stands in a JSON string, quoted for GBNF, whose escapes are JSON's."""
    inside = msgspec.json.encode(piece).decode()[1:-1]
    return msgspec.json.encode(inside).decode()
