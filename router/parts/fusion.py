"""Fusion: what encoders found in sounds, pictures and files becomes text in their place, or a mark of soft tokens.

A message that is one sound and nothing else becomes the words that were said, as if they had been typed: so a spoken
command is constrained, cached and counted as a typed one.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence

import msgspec

from ..errors import EncoderFailed, InvalidRequest
from ..types import AudioPart, Fact, FilePart, Message, Modality, Part, Request, TextPart, Transcripts
from .reading import file_name, modality_of

Facts = Mapping[tuple[int, int], Fact | None]
"""By message and index of the part; None: its encoder found nothing in time."""
Markers = Mapping[tuple[int, int], str]
"""What stands in the text for a part's soft tokens, by message and index of the part; "": there are none in time."""

_NO_MARKERS: Markers = {}
_WORDS: Mapping[Modality, tuple[str, str]] = {
    "image": ("picture", "text in it"),
    "audio": ("sound", "words in it"),
    "file": ("file", "text in it"),
}


def fuse(
    request: Request,
    facts: Facts,
    kinds: Sequence[Modality],
    transcripts: Transcripts = "written",
    markers: Markers = _NO_MARKERS,
) -> Request:
    """Return the request with its parts of these kinds as text.

    Args:
        transcripts: the form of a message that is one sound.
        markers: of parts that reach the model as soft tokens, whatever their kind.

    Raises:
        InvalidRequest: the last message is one sound without speech.
        EncoderFailed: nothing is left of the last message.
    """
    last = len(request.messages) - 1
    content = request.messages[last].content
    if type(content) is tuple:
        _check_last(last, content, facts, kinds, markers)
    messages = tuple(
        message
        if type(message.content) is not tuple
        else _fused(message, at, message.content, facts, kinds, transcripts, markers)
        for at, message in enumerate(request.messages)
    )
    return msgspec.structs.replace(request, messages=messages)


def _check_last(at: int, content: tuple[Part, ...], facts: Facts, kinds: Sequence[Modality], markers: Markers) -> None:
    left: list[object] = []
    for index, part in enumerate(content):
        if isinstance(part, TextPart):
            left.append(part.text)
        elif (at, index) in markers:
            left.append(markers[at, index])
        else:
            left.append(modality_of(part) not in kinds or facts.get((at, index)))
    if not any(left):
        raise EncoderFailed("nothing of the last message could be read in time. Send it again.", phase="send")
    fact = facts.get((at, 0))
    if len(content) == 1 and "audio" in kinds and isinstance(content[0], AudioPart) and fact is not None:
        path = f"messages[{at}].content[0].input_audio.data"
        if not fact.text:
            raise InvalidRequest(f"`{path}`: there is no speech in it. Send speech, or text beside it.", param=path)


def _fused(
    message: Message,
    at: int,
    parts: tuple[Part, ...],
    facts: Facts,
    kinds: Sequence[Modality],
    transcripts: Transcripts,
    markers: Markers,
) -> Message:
    fact = facts.get((at, 0))
    if len(parts) == 1 and "audio" in kinds and isinstance(parts[0], AudioPart) and fact is not None and fact.text:
        words = spoken_form(fact.text) if transcripts == "spoken" else fact.text
        return msgspec.structs.replace(message, content=words)
    content: list[Part] = []
    for index, part in enumerate(parts):
        modality = modality_of(part)
        if (at, index) in markers:
            marker = markers[at, index]
            content.append(TextPart(marker or _in_words(part, modality, None)))
        elif modality in kinds:
            content.append(TextPart(_in_words(part, modality, facts.get((at, index)))))
        else:
            content.append(part)
    return msgspec.structs.replace(message, content=tuple(content))


def _in_words(part: Part, modality: Modality, fact: Fact | None) -> str:
    kind, what = _WORDS[modality]
    if isinstance(part, FilePart) and (name := file_name(part)):
        kind = f"{kind} named {name}"
    if fact is None:
        return f"[A {kind} that could not be read.]"
    if fact.labels:
        shown = ", ".join(f"{label.name} ({label.probability:.2f})" for label in fact.labels)
        kind = f"{kind} that may show {shown}"
    if not fact.text:
        return f"[A {kind}, without {what}.]" if fact.labels else f"[A {kind} without {what}.]"
    sure = "" if modality == "file" and fact.confidence == 1.0 else f", with confidence {fact.confidence:.2f}"
    return f"[A {kind}; {what}{sure}:\n{fact.text}\n]"


_DOTTED = re.compile(r"\b(?:[^\W\d_]\.\s?){2,}")  # a.m., U.S.A., J. K.
_SIGNS = {"%": " percent", "&": " and ", "+": " plus "}
_SIGN = re.compile("[" + "".join(map(re.escape, _SIGNS)) + "]")
_KEPT = "'.,:"  # within words and numbers: don't, 3.5, 6:30
_OUTSIDE = re.compile(r"(?<![^\W\d_])'|'(?![^\W\d_])|(?<!\d)[.,:]|[.,:](?!\d)")


def spoken_form(text: str) -> str:
    """Return the words of a transcript in lower case, with single spaces; the text itself if it has no words.

    A model that learned from commands in this form (`transcripts: spoken` in its manifest) misreads "Wake me up at 6:30
    a.m.!", which a speech model writes.
    """
    lower = text.lower().replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
    joined = _DOTTED.sub(lambda match: re.sub(r"[.\s]", "", match[0]) + " ", lower)
    named = _SIGN.sub(lambda match: _SIGNS[match[0]], joined)
    plain = "".join(" " if _is_mark(character) else character for character in named)
    return " ".join(_OUTSIDE.sub(" ", plain).split()) or text


def _is_mark(character: str) -> bool:
    return character not in _KEPT and unicodedata.category(character)[0] in "PSC"
