"""The grammar (GBNF) of the calls that can answer one utterance: arguments hold nothing but the utterance's own words.

The assistants copy arguments. A model that would misread a long name on its own ("Varney the Varney the Varney …")
copies it right when only what follows in the text may follow in the answer. The device's engine and the cloud's hold
to it every answer of a model whose manifest says `answers: calls`, unless the caller says what it wants instead.
"""

from __future__ import annotations

import re

import msgspec

from router.types import Request, TextPart

ANSWER_TOKENS = 256  # more than any call takes that is not going in circles
MOST_PIECES = 300  # of an utterance; beyond that any text is allowed
MOST_CHARACTERS = 4000  # likewise
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
# A call whose arguments hold any text. Texts and lists are bounded, so that an answer that goes in circles still ends.
ANY_CALL = (
    _HEAD
    + _ARGUMENTS.lstrip()
    + r"""text ::= "\"" ([^"\\\x00-\x1F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4})){0,72} "\""
"""
)


def utterance_of(request: Request) -> str | None:
    """The text that a call answers: the last user message.

    None where the caller says what the answer is to look like: by a response format (`text` is one: an answer that
    nothing holds), by a call of its tools that must come, or by a prompt that is no chat.
    """
    if request.kind != "chat" or request.response_format is not None:
        return None
    if request.tools and request.tool_choice.mode in ("required", "function"):
        return None
    said = next((message.content for message in reversed(request.messages) if message.role == "user"), None)
    if said is None or isinstance(said, str):
        return said
    return "\n".join(part.text for part in said if isinstance(part, TextPart))


def call_grammar(utterance: str) -> str:
    """A value is one or more of the utterance's words and marks in a row, with the space between them as it stands.

    `ANY_CALL` for one that is too long. Half characters (lone surrogates) become question marks, as in prompts.
    """
    if len(utterance) > MOST_CHARACTERS:
        return ANY_CALL
    pieces = _PIECE.findall(utterance.encode(errors="replace").decode().strip())
    if len(pieces) > MOST_PIECES:
        return ANY_CALL
    words = [at for at, piece in enumerate(pieces) if not piece.isspace()]
    if not words:
        return _HEAD + 'arguments ::= "{}"\n'
    rules = [_rule(pieces, at) for at in words]
    starts = " | ".join(f"w{at}" for at in words)
    text = 'text ::= "\\"" value "\\""'
    return "\n".join([_HEAD.rstrip(), _ARGUMENTS.strip(), text, f"value ::= {starts}", *rules, ""])


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
