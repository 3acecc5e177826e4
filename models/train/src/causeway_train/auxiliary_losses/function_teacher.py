"""A teacher for the function's name: all-MiniLM-L6-v2 with one more layer, trained on the rows.

It was pretrained on a thousand million sentences and reads each message in both directions; it is too slow for any
shipped model. It passes on its probabilities, on any number of texts (function_distillation.py). For a row that several
functions answer, the sum of their probabilities is trained. A few rows are held out to calibrate the probabilities by
temperature scaling (Guo et al. 2017, arXiv 1706.04599).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

from ..function_calls.dataset import Row, is_held_out
from ..function_calls.intents import functions_for
from .bert import Bert, BertTokenizer, batches_by_length, load_bert

WARMUP = 100  # steps
HELD_OUT_SHARE, _HELD_OUT_SEED = 0.03, "tutor"  # share of the rows that the temperature is fitted on
LABEL_SMOOTHING = 0.02  # share of the probability that is spread over all functions
_ENDS = ("?", ".", "!")
_BATCH_TOKENS = 4096


class TeacherSchedule(msgspec.Struct, frozen=True):
    """Training schedule of a function teacher."""

    epochs: int = 3
    tokens: int = 768  # tokens per batch
    body_lr: float = 1.5e-4
    head_lr: float = 2e-3


class FunctionTeacher(nn.Module):
    """Maps texts to logits over `names`.

    MiniLM's tokenizer is uncased, so capitals and punctuation have an input of their own (`style`).
    """

    def __init__(self, bert: Bert, tokenizer: BertTokenizer, names: Sequence[str]) -> None:
        super().__init__()
        self.bert, self.tokenizer, self.names = bert, tokenizer, tuple(names)
        self.head = nn.Linear(bert.width, len(names))
        self.style_head = nn.Linear(1 + len(_ENDS), len(names), bias=False)
        self.temperature = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, ids: Tensor, style: Tensor) -> Tensor:
        """ids [n, length], style [n, _] → logits [n, names]."""
        return self._logits(self._states(ids), style)

    def _states(self, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            states: Tensor = self.bert(ids)
        return states.float()

    def _logits(self, states: Tensor, style: Tensor) -> Tensor:
        logits: Tensor = (self.head(states) + self.style_head(style)) / self.temperature
        return logits

    @torch.no_grad()
    def predict(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return probabilities, float32 [texts, names], and sentence vectors, float32 [texts, width].

        Args:
            tokens: per batch.
        """
        self.eval()
        ids = [self.tokenizer(text) for text in texts]
        probabilities = torch.zeros(len(texts), len(self.names))
        vectors = torch.zeros(len(texts), self.bert.width)
        for batch in batches_by_length(ids, _BATCH_TOKENS, random.Random(0)):
            inputs, style = _inputs(texts, ids, batch)
            vectors[batch] = self._states(inputs)
            probabilities[batch] = self._logits(vectors[batch], style).softmax(-1)
        return probabilities, vectors

    def probabilities(self, texts: Sequence[str]) -> Tensor:
        """Return the probability of each function, float32 [texts, names]."""
        return self.predict(texts)[0]

    @torch.no_grad()
    def vectors(self, texts: Sequence[str]) -> Tensor:
        """Return sentence vectors at full precision, float32 [texts, width]."""
        self.eval()
        ids = [self.tokenizer(text) for text in texts]
        vectors = torch.zeros(len(texts), self.bert.width)
        for batch in batches_by_length(ids, _BATCH_TOKENS, random.Random(0)):
            vectors[batch] = self.bert(torch.tensor([ids[i] for i in batch]))
        return vectors


def load_or_train_teacher(
    folder: Path,
    rows: Sequence[Row],
    names: Sequence[str],
    checkpoint: Path,
    *,
    seed: int,
    progress: Callable[[str], None],
    schedule: TeacherSchedule | None = None,
) -> FunctionTeacher:
    """Load the teacher from `checkpoint`, or train one from the published files in `folder` and save it there."""
    torch.manual_seed(seed)
    bert, tokenizer = load_bert(folder)
    teacher = FunctionTeacher(bert, tokenizer, names)
    if checkpoint.is_file():
        teacher.load_state_dict(torch.load(checkpoint, weights_only=True))
        return teacher.eval()
    _train(teacher, rows, schedule or TeacherSchedule(), seed, progress)
    partial = checkpoint.with_suffix(".partial")
    torch.save(teacher.state_dict(), partial)
    partial.replace(checkpoint)
    return teacher


def _train(
    teacher: FunctionTeacher, rows: Sequence[Row], schedule: TeacherSchedule, seed: int, progress: Callable[[str], None]
) -> None:
    held_out = [row for row in rows if is_held_out(row.text, _HELD_OUT_SEED, HELD_OUT_SHARE)]
    training = [row for row in rows if not is_held_out(row.text, _HELD_OUT_SEED, HELD_OUT_SHARE)]
    texts, answers = [row.text for row in training], answer_mask(training, teacher.names)
    ids, draw = [teacher.tokenizer(text) for text in texts], random.Random(seed)
    body = [weight for weight in teacher.bert.parameters() if weight.requires_grad]
    heads = [*teacher.head.parameters(), *teacher.style_head.parameters()]
    optimizer = torch.optim.AdamW(
        [{"params": body, "top": schedule.body_lr}, {"params": heads, "top": schedule.head_lr}], weight_decay=0.01
    )
    epochs = [list(batches_by_length(ids, schedule.tokens, draw)) for _ in range(schedule.epochs)]
    steps, step, started = sum(map(len, epochs)), 0, time.monotonic()
    for number, epoch in enumerate(epochs):
        teacher.train()
        losses = []
        for batch in epoch:
            factor = min(1.0, (step + 1) / min(WARMUP, steps / 10)) * (1 - step / steps)
            for group in optimizer.param_groups:
                group["lr"] = group["top"] * factor
            loss = -_log_likelihood(teacher(*_inputs(texts, ids, batch)), answers[batch]).mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(float(loss.detach()))
            step += 1
        minutes = (time.monotonic() - started) / 60
        result = f"accuracy {accuracy(teacher, held_out):.3f} on {len(held_out)} held-out rows" if held_out else ""
        progress(f"teacher: epoch {number + 1}, {minutes:.1f} min, loss {sum(losses) / len(losses):.3f}  {result}")
    if held_out:
        probabilities = teacher.probabilities([row.text for row in held_out])
        teacher.temperature.fill_(_fit_temperature(probabilities, answer_mask(held_out, teacher.names)))
        progress(f"teacher: temperature {float(teacher.temperature):.2f}")


def answer_mask(rows: Sequence[Row], names: Sequence[str]) -> Tensor:
    """Return for each row the functions that answer it correctly: bool [rows, names]."""
    columns = {name: index for index, name in enumerate(names)}
    mask = torch.zeros(len(rows), len(names), dtype=torch.bool)
    for index, row in enumerate(rows):
        mask[index, [columns[name] for name in functions_for(row.source, row.intent) if name in columns]] = True
    return mask


def accuracy(teacher: FunctionTeacher, rows: Sequence[Row]) -> float:
    """Return the share of rows whose most probable function answers them."""
    best = teacher.probabilities([row.text for row in rows]).argmax(-1)
    return float(answer_mask(rows, teacher.names)[torch.arange(len(rows)), best].float().mean())


def _log_likelihood(logits: Tensor, answers: Tensor) -> Tensor:
    """Return the smoothed log of the correct functions' summed probability: [n]."""
    logprobs = logits.log_softmax(-1)
    correct = logprobs.masked_fill(~answers, -torch.inf).logsumexp(-1)
    return (1 - LABEL_SMOOTHING) * correct + LABEL_SMOOTHING * logprobs.mean(-1)


def _fit_temperature(probabilities: Tensor, answers: Tensor) -> float:
    """Return the temperature with the highest likelihood of the correct functions."""
    logits = probabilities.clamp_min(1e-9).log()

    def cost(temperature: float) -> float:
        return -float((logits / temperature).log_softmax(-1).masked_fill(~answers, -torch.inf).logsumexp(-1).mean())

    return min((0.5 + 0.05 * step for step in range(50)), key=cost)


def _inputs(texts: Sequence[str], ids: Sequence[Sequence[int]], batch: Sequence[int]) -> tuple[Tensor, Tensor]:
    return torch.tensor([ids[i] for i in batch]), torch.tensor([_style(texts[i]) for i in batch])


def _style(text: str) -> list[float]:
    return [float(text[:1].isupper()), *(float(text.endswith(end)) for end in _ENDS)]
