"""Which argument each word of an utterance belongs to, as a lesson for the middle of the network.

A tagger learns what a generator learns only in the end: where each value begins and ends (joint intent and slot models:
Liu and Lane 2016, arXiv 1609.01454). While training, a linear map of the states before the last blocks has to name the
argument at every word of the utterance; where it is read twice, at the second reading. The blocks after it then find
what they copy already marked. The map is dropped afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...function_calls.call import slot_spans
from ...function_calls.dataset import Row
from ...function_calls.intents import argument_name
from ..network.tokenizer import AssistantTokenizer

OUTSIDE = 0


class SlotLabels:
    """Two numbers for each argument: a value's first token, and its others."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._at = {name: 1 + 2 * index for index, name in enumerate(arguments)}
        self.count = 1 + 2 * len(arguments)

    def tags(self, row: Row, vocabulary: AssistantTokenizer) -> list[int]:
        """The label of each token of the text; none at all where the values cannot be told apart."""
        places = slot_spans(row)
        if places is None:
            return []
        (encoded,) = vocabulary.encodings([row.text])
        return [self._label(row.text, start, end, places) for start, end in encoded.offsets]

    def _label(self, text: str, start: int, end: int, places: Sequence[tuple[int, int, str]]) -> int:
        start += text[start:end].startswith(" ")
        for first, last, slot in places:
            if first <= start < last:
                return self._at[argument_name(slot)] + (start > first)
        return OUTSIDE


class SlotTagger(nn.Module):
    """The linear map from states to labels."""

    def __init__(self, width: int, labels: int) -> None:
        super().__init__()
        self.map = nn.Linear(width, labels)

    def loss(self, states: Tensor, lessons: Sequence[tuple[int, Sequence[int]]]) -> Tensor:
        """Cross entropy at the tagged tokens; states [n, length, width], for each row the place of its first
        tagged token and the tags. 0 where a batch teaches nothing.
        """
        rows = [row for row, (_, tags) in enumerate(lessons) for _ in tags]
        if not rows:
            return torch.zeros((), device=states.device)
        places = [first + at for first, tags in lessons for at in range(len(tags))]
        wanted = torch.tensor([tag for _, tags in lessons for tag in tags], device=states.device)
        told = functional.rms_norm(states[rows, places].float(), (states.shape[-1],))
        return functional.cross_entropy(self.map(told), wanted)
