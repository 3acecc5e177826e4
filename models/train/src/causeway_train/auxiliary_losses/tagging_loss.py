"""An auxiliary loss in the middle of the network: predict the argument that each word belongs to (slot tagging).

A tagger learns early what a generator learns late: where each value begins and ends (joint intent and slot models: Liu
and Lane 2016, arXiv 1609.01454). During training, a linear map of the states before the last blocks predicts the
argument at every token of the message (of its repetition, if the prompt repeats it). The later blocks then see which
tokens belong to values. The map is discarded after training.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..function_calls.call import slot_spans
from ..function_calls.dataset import Row
from ..function_calls.intents import argument_name
from ..network.tokenizer import AssistantTokenizer

OUTSIDE = 0


class SlotLabels:
    """Two labels per argument: for the first token of a value, and for its other tokens."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._labels = {name: 1 + 2 * index for index, name in enumerate(arguments)}
        self.count = 1 + 2 * len(arguments)

    def tags(self, row: Row, tokenizer: AssistantTokenizer) -> list[int]:
        """Return the label of each token of the text; an empty list if the values cannot be located."""
        found = slot_spans(row)
        if found is None:
            return []
        (encoded,) = tokenizer.encode_with_offsets([row.text])
        return [self._label(row.text, start, end, found) for start, end in encoded.offsets]

    def _label(self, text: str, start: int, end: int, found: Sequence[tuple[int, int, str]]) -> int:
        start += text[start:end].startswith(" ")
        for first, last, slot in found:
            if first <= start < last:
                return self._labels[argument_name(slot)] + (start > first)
        return OUTSIDE


class SlotTagger(nn.Module):
    """The linear map from states to labels."""

    def __init__(self, width: int, labels: int) -> None:
        super().__init__()
        self.map = nn.Linear(width, labels)

    def loss(self, states: Tensor, targets: Sequence[tuple[int, Sequence[int]]]) -> Tensor:
        """Return the cross entropy at the tagged tokens, 0 if there are none.

        Args:
            states: [n, length, width].
            targets: for each row, the position of its first tagged token, and the tags.
        """
        rows = [row for row, (_, tags) in enumerate(targets) for _ in tags]
        if not rows:
            return torch.zeros((), device=states.device)
        positions = [first + offset for first, tags in targets for offset in range(len(tags))]
        labels = torch.tensor([tag for _, tags in targets for tag in tags], device=states.device)
        normed = functional.rms_norm(states[rows, positions].float(), (states.shape[-1],))
        return functional.cross_entropy(self.map(normed), labels)
