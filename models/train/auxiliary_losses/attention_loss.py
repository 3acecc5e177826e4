"""Where in the prompt each token of an answer comes from, as a lesson for attention.

An argument's value is copied from the prompt, so for most of an answer it is known which token to look at next. One
head of each of the last two layers is told to look there (supervised attention: Liu et al. 2016, arXiv 1609.04186): the
network then learns copying from every token directly, not only through the words that come out. Nothing of it is left
in the exported model.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...function_calls.call import slot_spans
from ...function_calls.dataset import Row
from ...function_calls.intents import argument_name
from ..network.tokenizer import AssistantTokenizer

NOWHERE = -1  # no lesson for this token


def sources(row: Row, target: Sequence[int], vocabulary: AssistantTokenizer) -> list[int]:
    """For each token of `target`, the place in the prompt that it is read from, or NOWHERE.

    The tokens of a value come from their own places; what closes the value looks at the token after it, and an
    argument's name at the start of its first value.
    """
    looks = [NOWHERE] * len(target)
    places = slot_spans(row)
    if not places:
        return looks
    (encoded,) = vocabulary.encodings([row.text])
    starts = {start + (row.text[start] == " "): index for index, (start, _) in reversed([*enumerate(encoded.offsets)])}
    at = 3  # after `{"name":`, the name and `,"arguments":{`
    for values in _by_argument(places):
        if values[0][0] in starts and at < len(target):
            looks[at] = starts[values[0][0]] + 1  # the prompt leads with <|user|>
        at += 1
        for start, end in values:
            count = len(vocabulary.value(row.text[start:end]))
            first = starts.get(start)
            if first is not None and encoded.offsets[min(first + count, len(encoded.ids)) - 1][1] == end:
                looks[at : at + count + 1] = range(first + 1, first + count + 2)
            at += count + 1
    return looks if at == len(target) - 1 else [NOWHERE] * len(target)


def _by_argument(places: Sequence[tuple[int, int, str]]) -> list[list[tuple[int, int]]]:
    """The values' spans in the order in which an answer names them (`answer.expected`)."""
    grouped: dict[str, list[tuple[int, int]]] = {}
    for start, end, slot in places:
        grouped.setdefault(argument_name(slot), []).append((start, end))
    return list(grouped.values())
