"""The grammar of the calls that can answer one message: arguments contain only words of that message.

The assistants copy their arguments. A small model misreads a long name ("Varney the Varney the Varney …") but copies it
correctly when only the word that follows in the text may follow in the answer. The engines on the device and in the
cloud apply the grammar to every answer of a model whose manifest says `answers: calls`, unless the request constrains
the answer itself.
"""

from __future__ import annotations

import json
import re
from typing import Final

from llguidance import LLMatcher

ANSWER_TOKENS = 256  # more than any call needs that does not repeat itself
MAX_PIECES = 300  # words, marks and spaces of the text; beyond it arguments may have any text
MAX_CHARACTERS = 4000  # likewise
MOST_LISTED = 20  # words and marks whose runs, 210 at most, are listed
_PIECE = re.compile(r"\w+|\s+|[^\w\s]")
_NAME: Final = {"type": "string", "pattern": "^[a-z_0-9]{1,48}$"}
_RUN_IN_LARK: Final = r"""start: "{\"name\":" NAME ",\"arguments\":{" arguments "}}"
NAME: /"[a-z_0-9]{1,48}"/
arguments: (pair ("," pair){0,6})?
pair: NAME ":" (TEXT | "[" TEXT ("," TEXT){0,3} "]")
TEXT: "\"" VALUE "\""
VALUE: RUN & /[^ ]((?s:.*)[^ ])?/
RUN: %regex """
"""A run begins and ends with a word, though a space is a piece, too."""


def _call_with(value: dict[str, object] | None) -> str:
    """Return the grammar of calls whose arguments have this schema, or that have none.

    Texts and lists are bounded, so that an answer that repeats itself still ends.
    """
    arguments: dict[str, object] = {"type": "object", "additionalProperties": False}
    if value is not None:
        one = {"$ref": "#/$defs/value"}
        one_or_more = {"anyOf": [one, {"type": "array", "items": one, "minItems": 1, "maxItems": 4}]}
        arguments |= {"patternProperties": {_NAME["pattern"]: one_or_more}, "maxProperties": 7}
    schema = {
        "type": "object",
        "properties": {"name": _NAME, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
        "$defs": {"value": value or {}},
    }
    return LLMatcher.grammar_from_json_schema(
        schema, overrides={"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
    )


ANY_CALL: Final = _call_with({"type": "string", "maxLength": 72})
"""A call whose arguments have any text."""


def call_grammar(copy_source: str) -> str:
    """Return a grammar in which a value is a run of words and marks of `copy_source`, with the spaces between them.

    A short text's runs are listed in a schema, which llguidance compiles in half the time of a Lark grammar. A text
    that is too long gets `ANY_CALL`. Lone surrogates become question marks, as in prompts.
    """
    if len(copy_source) > MAX_CHARACTERS:
        return ANY_CALL
    pieces = _PIECE.findall(copy_source.encode(errors="replace").decode().strip())
    if len(pieces) > MAX_PIECES:
        return ANY_CALL
    starts = [at for at, piece in enumerate(pieces) if not piece.isspace()]
    if len(starts) > MOST_LISTED:
        run = json.dumps({"substring_chunks": [_in_json(piece) for piece in pieces]})
        return LLMatcher.grammar_from_lark(f"{_RUN_IN_LARK}{run}\n")
    runs = ("".join(pieces[start : end + 1]) for start in starts for end in starts if end >= start)
    return _call_with({"enum": list(dict.fromkeys(runs))} if starts else None)


def _in_json(piece: str) -> str:
    return json.dumps(piece, ensure_ascii=False)[1:-1]
