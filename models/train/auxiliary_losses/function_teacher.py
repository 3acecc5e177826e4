"""A tutor for the function's name: all-MiniLM-L6-v2 with one layer more, trained on the rows at hand.

It has read a thousand million sentences and sees each utterance in both directions; no model that ships could afford
it. What it passes on are its probabilities, on as many texts as one likes (`hints`). A row that several functions
answer teaches their sum. A few rows are kept from it: on those its probabilities are made to mean what they say
(temperature scaling: Guo et al. 2017, arXiv 1706.04599).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

from ...function_calls.dataset import Row, is_held_out
from ...function_calls.intents import functions_for
from .bert import Bert, BertTokenizer, load_bert, same_lengths

WARMUP = 100  # steps
KEPT, _KEPT_SEED = 0.03, "tutor"  # of the rows, for the temperature
SMOOTHED = 0.02  # share of all probability that goes to every function alike
_ENDS = ("?", ".", "!")


class TeacherSchedule(msgspec.Struct, frozen=True):
    """How long and how fast a tutor learns."""

    epochs: int = 3
    tokens: int = 768  # per batch
    body_lr: float = 1.5e-4
    head_lr: float = 2e-3


class FunctionTeacher(nn.Module):
    """Texts to logits over `names`. MiniLM knows no capitals; how a text is written goes past it."""

    def __init__(self, bert: Bert, reading: BertTokenizer, names: Sequence[str]) -> None:
        super().__init__()
        self.bert, self.reading, self.names = bert, reading, tuple(names)
        self.head = nn.Linear(bert.width, len(names))
        self.written = nn.Linear(1 + len(_ENDS), len(names), bias=False)
        self.temperature = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, ids: Tensor, style: Tensor) -> Tensor:
        """ids [n, length], style [n, _] → logits [n, names]."""
        return self._named(self._states(ids), style)

    def _states(self, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            states: Tensor = self.bert(ids)
        return states.float()

    def _named(self, states: Tensor, style: Tensor) -> Tensor:
        told: Tensor = (self.head(states) + self.written(style)) / self.temperature
        return told

    @torch.no_grad()
    def read(self, texts: Sequence[str], tokens: int = 4096) -> tuple[Tensor, Tensor]:
        """Probabilities, float32 [texts, names], and the vectors that they come from, float32 [texts, width]."""
        self.eval()
        ids = [self.reading(text) for text in texts]
        shares = torch.zeros(len(texts), len(self.names))
        vectors = torch.zeros(len(texts), self.bert.width)
        for at in same_lengths(ids, tokens, random.Random(0)):
            batch, style = _inputs(texts, ids, at)
            vectors[at] = self._states(batch)
            shares[at] = self._named(vectors[at], style).softmax(-1)
        return shares, vectors

    def tell(self, texts: Sequence[str]) -> Tensor:
        """Probabilities, float32 [texts, names]."""
        return self.read(texts)[0]

    @torch.no_grad()
    def vectors(self, texts: Sequence[str], tokens: int = 4096) -> Tensor:
        """What it makes of texts before it names functions, float32 [texts, width]."""
        self.eval()
        ids = [self.reading(text) for text in texts]
        made = torch.zeros(len(texts), self.bert.width)
        for at in same_lengths(ids, tokens, random.Random(0)):
            made[at] = self.bert(torch.tensor([ids[i] for i in at]))
        return made


def find_teacher(
    folder: Path,
    rows: Sequence[Row],
    names: Sequence[str],
    kept: Path,
    *,
    seed: int,
    say: Callable[[str], None],
    course: TeacherSchedule | None = None,
) -> FunctionTeacher:
    """The tutor that lies in the file `kept`, or a new one that starts from the published files in `folder`."""
    torch.manual_seed(seed)
    bert, reading = load_bert(folder)
    tutor = FunctionTeacher(bert, reading, names)
    if kept.is_file():
        tutor.load_state_dict(torch.load(kept, weights_only=True))
        return tutor.eval()
    _teach(tutor, rows, course or TeacherSchedule(), seed, say)
    partial = kept.with_suffix(".partial")
    torch.save(tutor.state_dict(), partial)
    partial.replace(kept)
    return tutor


def _teach(
    tutor: FunctionTeacher, rows: Sequence[Row], course: TeacherSchedule, seed: int, say: Callable[[str], None]
) -> None:
    apart = [is_held_out(row.text, _KEPT_SEED, KEPT) for row in rows]
    taught = [row for row, one in zip(rows, apart, strict=True) if not one]
    asked = [row for row, one in zip(rows, apart, strict=True) if one]
    texts, answers = [row.text for row in taught], answering(taught, tutor.names)
    ids, draw = [tutor.reading(text) for text in texts], random.Random(seed)
    body = [weight for weight in tutor.bert.parameters() if weight.requires_grad]
    own = [*tutor.head.parameters(), *tutor.written.parameters()]
    optimizer = torch.optim.AdamW(
        [{"params": body, "top": course.body_lr}, {"params": own, "top": course.head_lr}], weight_decay=0.01
    )
    epochs = [list(same_lengths(ids, course.tokens, draw)) for _ in range(course.epochs)]
    steps, step, began = sum(map(len, epochs)), 0, time.monotonic()
    for number, epoch in enumerate(epochs):
        tutor.train()
        losses = []
        for at in epoch:
            pace = min(1.0, (step + 1) / min(WARMUP, steps / 10)) * (1 - step / steps)
            for group in optimizer.param_groups:
                group["lr"] = group["top"] * pace
            loss = -_reward(tutor(*_inputs(texts, ids, at)), answers[at]).mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(float(loss.detach()))
            step += 1
        told = f"{share_right(tutor, asked):.3f} of {len(asked)} rows that it was not taught" if asked else "no row"
        minutes = (time.monotonic() - began) / 60
        say(f"tutor: epoch {number + 1}, {minutes:.1f} min, loss {sum(losses) / len(losses):.3f}, right on {told}")
    if asked:
        tutor.temperature.fill_(_temperature(tutor.tell([row.text for row in asked]), answering(asked, tutor.names)))
        say(f"tutor: temperature {float(tutor.temperature):.2f}")


def answering(rows: Sequence[Row], names: Sequence[str]) -> Tensor:
    """Which functions answer which row: bool [rows, names]."""
    places = {name: index for index, name in enumerate(names)}
    found = torch.zeros(len(rows), len(names), dtype=torch.bool)
    for index, row in enumerate(rows):
        found[index, [places[name] for name in functions_for(row.source, row.intent) if name in places]] = True
    return found


def share_right(tutor: FunctionTeacher, rows: Sequence[Row]) -> float:
    best = tutor.tell([row.text for row in rows]).argmax(-1)
    return float(answering(rows, tutor.names)[torch.arange(len(rows)), best].float().mean())


def _reward(logits: Tensor, answers: Tensor) -> Tensor:
    """Log probability of any right function, [n]; a little of it for every function, so that none is ruled out."""
    told = logits.log_softmax(-1)
    right = told.masked_fill(~answers, -torch.inf).logsumexp(-1)
    return (1 - SMOOTHED) * right + SMOOTHED * told.mean(-1)


def _temperature(shares: Tensor, answers: Tensor) -> float:
    """The one that makes the right answers of rows that were not taught most probable."""
    logits = shares.clamp_min(1e-9).log()

    def cost(temperature: float) -> float:
        return -float((logits / temperature).log_softmax(-1).masked_fill(~answers, -torch.inf).logsumexp(-1).mean())

    return min((0.5 + 0.05 * step for step in range(50)), key=cost)


def _inputs(texts: Sequence[str], ids: Sequence[Sequence[int]], at: Sequence[int]) -> tuple[Tensor, Tensor]:
    return torch.tensor([ids[i] for i in at]), torch.tensor([_style(texts[i]) for i in at])


def _style(text: str) -> list[float]:
    return [float(text[:1].isupper()), *(float(text.endswith(end)) for end in _ENDS)]
