"""The grammar (GBNF) of the calls that can answer one utterance: arguments hold nothing but the utterance's own words.

The assistants copy arguments. A model that would misread a long name on its own ("Varney the Varney the Varney …")
copies it right when only what follows in the text may follow in the answer. The device's engine and the cloud's hold
to it every answer of a model whose manifest says `answers: calls`, unless the caller says what it wants instead.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

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


def copy_source_of(request: Request) -> str | None:
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


def call_grammar(copy_source: str) -> str:
    """A value is one or more of the utterance's words and marks in a row, with the space between them as it stands.

    `ANY_CALL` for one that is too long. Half characters (lone surrogates) become question marks, as in prompts.
    """
    if len(copy_source) > MOST_CHARACTERS:
        return ANY_CALL
    pieces = _PIECE.findall(copy_source.encode(errors="replace").decode().strip())
    if len(pieces) > MOST_PIECES:
        return ANY_CALL
    words = _words(pieces)
    if not words:
        return _HEAD + 'arguments ::= "{}"\n'
    return "\n".join([_HEAD.rstrip(), _ARGUMENTS.strip(), 'text ::= "\\"" value "\\""', *_runs(words), ""])


def _words(pieces: Sequence[str]) -> list[tuple[str, str]]:
    """Each word or mark, with the space before it."""
    before = ["", *pieces]
    return [
        (space if space.isspace() else "", piece)
        for space, piece in zip(before, pieces, strict=False)
        if not piece.isspace()
    ]


def _runs(words: Sequence[tuple[str, str]]) -> list[str]:
    """Rules for every run of words. A rule stands for all places where the same was said up to there (the states of a
    suffix automaton, at most two for a word: Blumer et al. 1985), so that only one of them is ever followed at a time:
    of a word that is repeated without end, llama.cpp would follow each.
    """
    names: dict[tuple[int, ...], str] = {}  # places of the last word said → rule of what may come behind it
    rules: list[str] = []

    def alternatives(groups: Mapping[str, Sequence[int]]) -> str:
        return " | ".join(f"{_literal(text)} {name(tuple(places))}".rstrip() for text, places in groups.items())

    def name(places: tuple[int, ...]) -> str:
        if places == (len(words) - 1,):
            return ""  # behind the last word comes nothing
        if places not in names:
            names[places] = f"w{len(names)}"
            waiting.append(places)
        return names[places]

    waiting: deque[tuple[int, ...]] = deque()
    rules.append("value ::= " + alternatives(_grouped((word, at) for at, (_, word) in enumerate(words))))
    while waiting:
        places = waiting.popleft()
        behind = _grouped(("".join(words[at + 1]), at + 1) for at in places if at + 1 < len(words))
        rules.append(f"{names[places]} ::= ({alternatives(behind)})?")
    return rules


def _grouped(said: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for text, at in said:
        groups.setdefault(text, []).append(at)
    return groups


def _literal(piece: str) -> str:
    """As it stands in a JSON string, quoted for GBNF, whose escapes are JSON's."""
    inside = msgspec.json.encode(piece).decode()[1:-1]
    return msgspec.json.encode(inside).decode()
