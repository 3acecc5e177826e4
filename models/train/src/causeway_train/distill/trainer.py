"""Training of a student's adapter: a time limit, checkpoints, and a run that resumes where it was stopped.

Each worker is a thread with a part of the batch and one core: threads that share an operation would wait for each other
at every matrix on a busy machine.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from torch.nn import functional

from causeway_server.models.catalog.artifact import ArtifactError

from .network import Student

CHECKPOINT, LOG = "checkpoint.pt", "log.jsonl"
MAX_STEP_S = 120.0  # a longer step is counted as this long: the machine slept or the run was paused


class LearnedAnswer(msgspec.Struct, frozen=True):
    """A prompt and the answer to learn, in tokens of the student.

    `soft`: for each token of the answer the teacher's likeliest tokens with their probabilities; empty where the
    teacher gives none.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    soft: tuple[tuple[tuple[int, float], ...], ...] = ()


class AdapterPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shape of the adapter and schedule of its training."""

    minutes: float
    epochs: float = 3.0
    rank: int = 16
    first_layer: int = 0  # layers before it have no adapter and cost no gradients
    learning_rate: float = 1e-3
    warmup_steps: int = 20
    batch_rows: int = 32
    soft_weight: float = 0.5  # weight of the teacher's probabilities against its answer
    average_decay: float = 0.98  # decay per step of the averaged adapter, which is the one that is kept
    seed: int = 1
    threads: int = 2
    report_minutes: float = 3.0


class Progress(msgspec.Struct, frozen=True):
    """A line of the log."""

    step: int
    minutes: float
    rows: int
    loss: float
    held_loss: float | None = None


class AdapterTrainer:
    """Owns the adapter, its optimizer and the checkpoint of one run."""

    def __init__(self, student: Student, plan: AdapterPlan, folder: Path) -> None:
        torch.set_num_threads(1)
        self.student, self.plan, self.folder = student, plan, folder
        self.step, self.rows, self.spent_s = 0, 0, 0.0
        self._parameters = [one for one in student.parameters() if one.requires_grad]
        self._average = [one.detach().clone() for one in self._parameters]
        self._optimizer = torch.optim.AdamW(self._parameters, plan.learning_rate, (0.9, 0.98), weight_decay=0.0)
        folder.mkdir(parents=True, exist_ok=True)

    def resume(self) -> bool:
        """Load the last checkpoint; return whether there was one.

        Raises:
            ArtifactError: The checkpoint is of another student or adapter.
        """
        path = self.folder / CHECKPOINT
        if not path.is_file():
            return False
        state = torch.load(path, map_location="cpu", weights_only=True)
        shapes = [list(one.shape) for one in self._parameters]
        if state["shapes"] != shapes:
            raise ArtifactError(f"{path} is of another student or rank: use another folder for this run")
        with torch.no_grad():
            for one, values in zip(self._parameters, state["adapter"], strict=True):
                one.copy_(values)
        self._average = state["average"]
        self._optimizer.load_state_dict(state["optimizer"])
        self.step, self.rows, self.spent_s = state["step"], state["rows"], state["spent_s"]
        return True

    def save(self) -> None:
        """Write the checkpoint, atomically."""
        state = {
            "shapes": [list(one.shape) for one in self._parameters],
            "adapter": [one.detach() for one in self._parameters],
            "average": self._average,
            "optimizer": self._optimizer.state_dict(),
            "step": self.step,
            "rows": self.rows,
            "spent_s": self.spent_s,
        }
        partial = self.folder / f"{CHECKPOINT}.partial"
        torch.save(state, partial)
        partial.replace(self.folder / CHECKPOINT)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[Student]:
        """The student with the averaged adapter."""
        current = [one.detach().clone() for one in self._parameters]
        try:
            self._set(self._average)
            yield self.student
        finally:
            self._set(current)

    def run(
        self,
        examples: Sequence[LearnedAnswer],
        held: Sequence[LearnedAnswer] = (),
        progress: Callable[[Progress], None] = lambda _: None,
    ) -> None:
        """Train until the plan's minutes or epochs are used, the earlier of both.

        Args:
            held: Examples that are not learned; their loss is in each report.
            progress: Called with each report, after a checkpoint.
        """
        prefix = shared_prefix([*examples, *held])
        last, losses, reported = time.monotonic(), list[float](), self.spent_s
        with ThreadPoolExecutor(self.plan.threads) as workers:
            while (done := self._done(len(examples))) < 1.0:
                batch = self._batch(examples)
                losses.append(self._train_step(prefix, batch, done, workers))
                now = time.monotonic()
                self.spent_s, last = self.spent_s + min(now - last, MAX_STEP_S), now
                if self.spent_s - reported > 60 * self.plan.report_minutes or self._done(len(examples)) >= 1.0:
                    reported = self.spent_s
                    self.save()
                    held_loss = self.loss_of(held, prefix) if held else None
                    mean = sum(losses) / len(losses)
                    line = Progress(self.step, self.spent_s / 60, self.rows, mean, held_loss)
                    with (self.folder / LOG).open("ab") as log:
                        log.write(msgspec.json.encode(line) + b"\n")
                    progress(line)
                    losses.clear()
                    last = time.monotonic()  # the report is not training time

    def loss_of(self, examples: Sequence[LearnedAnswer], prefix: Sequence[int]) -> float:
        """Return the averaged adapter's mean loss per token of the answers."""
        with torch.no_grad(), self.averaged():
            sums = [self._loss(prefix, part) for part in _parts(examples, math.ceil(len(examples) / 32))]
        return float(sum(sums)) / sum(len(one.answer) for one in examples)

    def _done(self, examples: int) -> float:
        return max(self.spent_s / (60 * self.plan.minutes), self.rows / (self.plan.epochs * examples))

    def _batch(self, examples: Sequence[LearnedAnswer]) -> list[LearnedAnswer]:
        """Return the next rows of an order that depends only on seed and epoch, so that a resumed run continues it."""
        epoch, start = divmod(self.rows, len(examples))
        order = list(range(len(examples)))
        random.Random(f"{self.plan.seed} {epoch}").shuffle(order)
        return [examples[index] for index in order[start : start + self.plan.batch_rows]]

    def _train_step(
        self, prefix: Sequence[int], batch: Sequence[LearnedAnswer], done: float, workers: ThreadPoolExecutor
    ) -> float:
        tokens = sum(len(one.answer) for one in batch)

        def work(part: Sequence[LearnedAnswer]) -> tuple[float, tuple[Tensor, ...]]:
            loss = self._loss(prefix, part) / tokens
            return loss.item(), torch.autograd.grad(loss, self._parameters)

        results = list(workers.map(work, _parts(batch, self.plan.threads)))
        for index, one in enumerate(self._parameters):
            one.grad = torch.stack([gradients[index] for _, gradients in results]).sum(0)
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        warm = min(1.0, (self.step + 1) / self.plan.warmup_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = self.plan.learning_rate * warm * max(0.02, 1.0 - done)
        self._optimizer.step()
        self.step, self.rows = self.step + 1, self.rows + len(batch)
        share = 1.0 - min(self.plan.average_decay, self.step / (self.step + 10))
        with torch.no_grad():
            for mean, one in zip(self._average, self._parameters, strict=True):
                mean.lerp_(one, share)
        return sum(loss for loss, _ in results)

    def _loss(self, prefix: Sequence[int], part: Sequence[LearnedAnswer]) -> Tensor:
        """Return the sum of the losses of the answers' tokens."""
        start = len(prefix)
        rows = [[*one.prompt[start:], *one.answer] for one in part]
        length = max(map(len, rows)) - 1
        ids = torch.tensor([(row[:-1] + [0] * length)[:length] for row in rows])
        wanted = torch.zeros(ids.shape, dtype=torch.bool)
        for index, one in enumerate(part):
            first = len(one.prompt) - start - 1
            wanted[index, first : first + len(one.answer)] = True
        logits = self.student(prefix, ids, wanted).float()
        targets = torch.tensor([token for one in part for token in one.answer])
        hard = functional.cross_entropy(logits, targets, reduction="none")
        soft = [(at, pairs) for at, pairs in enumerate(pairs for one in part for pairs in _soft(one)) if pairs]
        if not soft or not self.plan.soft_weight:
            return hard.sum()
        places = torch.tensor([at for at, _ in soft])
        most = max(len(pairs) for _, pairs in soft)
        padded = torch.tensor([[*pairs, *[(0, 0.0)] * (most - len(pairs))] for _, pairs in soft])  # [places, most, 2]
        tokens, chances = padded[..., 0].long(), padded[..., 1]
        logprobs = functional.log_softmax(logits[places], -1).gather(1, tokens)
        divergence = (torch.xlogy(chances, chances) - chances * logprobs).sum(-1)  # over the likeliest tokens
        return hard.index_add(0, places, self.plan.soft_weight * (divergence - hard[places])).sum()

    def _set(self, values: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for one, new in zip(self._parameters, values, strict=True):
                one.copy_(new)


def shared_prefix(examples: Sequence[LearnedAnswer]) -> tuple[int, ...]:
    """Return the tokens with which all prompts begin, less the last token of the shortest."""
    first = examples[0].prompt
    length = min(common_prefix_of(first, one.prompt) for one in examples)
    return first[: min(length, *(len(one.prompt) - 1 for one in examples))]


def common_prefix_of(one: Sequence[int], other: Sequence[int]) -> int:
    length = min(len(one), len(other))
    return next((at for at in range(length) if one[at] != other[at]), length)


def _soft(example: LearnedAnswer) -> Sequence[tuple[tuple[int, float], ...]]:
    return example.soft or [()] * len(example.answer)


def _parts(examples: Sequence[LearnedAnswer], count: int) -> list[Sequence[LearnedAnswer]]:
    """Split into `count` parts of rows of similar length, with similar numbers of tokens."""
    ordered = sorted(examples, key=lambda one: len(one.prompt) + len(one.answer))
    total = sum(len(one.prompt) + len(one.answer) for one in ordered)
    parts: list[list[LearnedAnswer]] = [[] for _ in range(count)]
    tokens = 0
    for one in ordered:
        parts[min(count - 1, tokens * count // total)].append(one)
        tokens += len(one.prompt) + len(one.answer)
    return [part for part in parts if part]
