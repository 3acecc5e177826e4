"""Targets for supervised attention: the prompt position that each token of an answer is copied from.

An argument's value is copied from the prompt, so for most tokens of an answer the source position is known. One head of
each of the last two layers is trained to attend to it (supervised attention: Liu et al. 2016, arXiv 1609.04186): the
network learns to copy from every token directly, not only through the next-token loss. The exported model is unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..function_calls.call import slot_spans
from ..function_calls.dataset import Row
from ..function_calls.intents import argument_name
from ..network.tokenizer import AssistantTokenizer

NO_TARGET = -1  # the token is not copied


def attention_targets(row: Row, target: Sequence[int], tokenizer: AssistantTokenizer) -> list[int]:
    """Return, for each token of the answer `target`, the prompt position to attend to, or NO_TARGET.

    Tokens of a value attend to their own positions; the token that closes a value, to the one after it; an argument's
    name, to the start of its first value.
    """
    positions = [NO_TARGET] * len(target)
    found = slot_spans(row)
    if not found:
        return positions
    (encoded,) = tokenizer.encode_with_offsets([row.text])
    starts = {start + (row.text[start] == " "): index for index, (start, _) in reversed([*enumerate(encoded.offsets)])}
    index = 3  # after `{"name":`, the name and `,"arguments":{`
    for values in _by_argument(found):
        if values[0][0] in starts and index < len(target):
            positions[index] = starts[values[0][0]] + 1  # <|user|> is the first token of the prompt
        index += 1
        for start, end in values:
            count = len(tokenizer.encode_value(row.text[start:end]))
            first = starts.get(start)
            if first is not None and encoded.offsets[min(first + count, len(encoded.ids)) - 1][1] == end:
                positions[index : index + count + 1] = range(first + 1, first + count + 2)
            index += count + 1
    return positions if index == len(target) - 1 else [NO_TARGET] * len(target)


def _by_argument(found: Sequence[tuple[int, int, str]]) -> list[list[tuple[int, int]]]:
    """Return the spans of the values, ordered as an answer holds the values (`call.expected_call`)."""
    grouped: dict[str, list[tuple[int, int]]] = {}
    for start, end, slot in found:
        grouped.setdefault(argument_name(slot), []).append((start, end))
    return list(grouped.values())
