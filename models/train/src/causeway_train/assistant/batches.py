"""Batches of examples: how they are formed, the network's outputs at the answers' tokens, and the losses and accuracy
computed from those outputs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.nn import functional

from ..auxiliary_losses.attention_loss import NO_TARGET
from ..network.llama import AuxiliaryOutputs, Llama
from .mixture import Example


def batches(examples: Sequence[Example], tokens: int, draw: random.Random) -> Iterator[list[Example]]:
    """Yield batches of at most `tokens` tokens with padding, of examples of similar length, in random order."""
    ordered = sorted(examples, key=lambda one: len(one.prompt) + len(one.target) + 2 * draw.random())
    groups: list[list[Example]] = [[]]
    longest = 0
    for example in ordered:
        longest = max(longest, len(example.prompt) + len(example.target))
        if groups[-1] and longest * (len(groups[-1]) + 1) > tokens:
            groups.append([])
            longest = len(example.prompt) + len(example.target)
        groups[-1].append(example)
    draw.shuffle(groups)
    return iter(groups)


def soft_targets(batch: Sequence[Example]) -> list[tuple[int, list[tuple[int, float]]]]:
    """Return the soft targets of a batch, each with its index among all target tokens of the batch."""
    found, offset = [], 0
    for one in batch:
        found += [(offset + soft.position, soft.probabilities) for soft in one.soft_targets]
        offset += len(one.target)
    return found


def answer_logits(
    network: Llama, batch: Sequence[Example], device: str = "cpu", auxiliary: AuxiliaryOutputs | None = None
) -> tuple[Tensor, Tensor]:
    """Return logits [targets, vocabulary] at the answers' positions only, and the target ids [targets].

    Args:
        auxiliary: Filled with the outputs that the auxiliary losses need.
    """
    length = max(len(one.prompt) + len(one.target) for one in batch) - 1
    length += -length % 8
    ids = torch.zeros(len(batch), length, dtype=torch.long)
    positions: list[int] = []
    targets: list[int] = []
    for row, one in enumerate(batch):
        sequence = one.prompt + one.target[:-1]
        ids[row, : len(sequence)] = torch.tensor(sequence)
        first = row * length + len(one.prompt) - 1
        positions.extend(range(first, first + len(one.target)))
        targets.extend(one.target)
    hidden = network.hidden(ids.to(device), auxiliary).flatten(0, 1)
    if auxiliary:
        firsts = [row * length + len(one.prompt) - 1 for row, one in enumerate(batch)]
        auxiliary.answer_states = hidden[torch.tensor(firsts, device=device)]
    return network.logits(hidden[torch.tensor(positions, device=device)]), torch.tensor(targets, device=device)


def attention_loss(batch: Sequence[Example], attention_scores: Sequence[Tensor]) -> Tensor:
    """Return the mean cross entropy of the supervised heads' attention with its targets, 0 if a batch has none.

    Args:
        attention_scores: Scores of each supervised head before softmax, [n, length, length].
    """
    supervised = [
        (row, len(one.prompt) - 1 + index, position)
        for row, one in enumerate(batch)
        for index, position in enumerate(one.attention_targets)
        if position != NO_TARGET
    ]
    if not supervised:
        return torch.zeros(())
    rows, queries, targets = torch.tensor(supervised, device=attention_scores[0].device).unbind(1)
    losses = [functional.cross_entropy(scores[rows, queries].float(), targets) for scores in attention_scores]
    return torch.stack(losses).mean()


@torch.no_grad()
def answer_accuracy(network: Llama, examples: Sequence[Example], device: str = "cpu") -> tuple[float, float]:
    """Return the share of examples with the correct function, and the share with every token correct.

    Greedy decoding would give the same answers.
    """
    network.eval()
    functions, exact = 0, 0
    for batch in batches(examples, 8192, random.Random(0)):
        with autocast(device):
            logits, targets = answer_logits(network, batch, device)
        lengths = [len(one.target) for one in batch]
        correct = (logits.argmax(-1) == targets).split(lengths)  # type: ignore[no-untyped-call]
        functions += sum(bool(one[:2].all()) for one in correct)
        exact += sum(bool(one.all()) for one in correct)
    return functions / len(examples), exact / len(examples)


def autocast(device: str) -> AbstractContextManager[None]:
    return torch.autocast(device, dtype=torch.bfloat16)
