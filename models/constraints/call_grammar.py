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
_PIECE = re.compile(r"\w+|\s+|[^\w\s]")
_CALL: Final = r"""start: "{\"name\":" NAME ",\"arguments\":{" arguments "}}"
NAME: /"[a-z_0-9]{1,48}"/
"""
# Texts and lists are bounded, so that an answer that repeats itself still ends.
_PAIRS: Final = r"""arguments: (pair ("," pair){0,6})?
pair: NAME ":" (TEXT | "[" TEXT ("," TEXT){0,3} "]")
"""
ANY_CALL: Final = LLMatcher.grammar_from_lark(
    _CALL + _PAIRS + r'TEXT: /"([^"\\\x00-\x1f]|\\["\\\/bfnrt]){0,72}"/' + "\n"
)
"""A call whose arguments have any text."""


def call_grammar(copy_source: str) -> str:
    """Return a grammar in which a value is a run of words and marks of `copy_source`, with the spaces between them.

    A text that is too long gets `ANY_CALL`. Lone surrogates become question marks, as in prompts.
    """
    if len(copy_source) > MAX_CHARACTERS:
        return ANY_CALL
    pieces = _PIECE.findall(copy_source.encode(errors="replace").decode().strip())
    if len(pieces) > MAX_PIECES:
        return ANY_CALL
    if not pieces:
        return LLMatcher.grammar_from_lark(_CALL + 'arguments: ""\n')
    run = json.dumps({"substring_chunks": [_in_json(piece) for piece in pieces]})
    value = "VALUE: RUN & /[^ ]((?s:.*)[^ ])?/"  # a run begins and ends with a word, though a space is a chunk
    return LLMatcher.grammar_from_lark(f'{_CALL}{_PAIRS}TEXT: "\\"" VALUE "\\""\n{value}\nRUN: %regex {run}\n')


def _in_json(piece: str) -> str:
    return json.dumps(piece, ensure_ascii=False)[1:-1]
