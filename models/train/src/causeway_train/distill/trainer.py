"""Training of a student's adapter: a time limit, checkpoints, and a run that resumes where it was stopped.

Each worker is a thread with a part of the batch and one core: threads that share an operation would wait for each other
at every matrix on a busy machine.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from torch.nn import functional

from causeway_server.models.catalog.artifact import ArtifactError

from .network import Student
from .row_states import RowStates

CHECKPOINT, LOG = "checkpoint.pt", "log.jsonl"
MAX_STEP_S = 120.0  # a longer step is counted as this long: the machine slept or the run was paused
_SORTED_BATCHES = 6  # batches whose rows are sorted by length together, so that little of a batch is padding


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
    first_layer: int = 0  # layers before it have no adapter; they are computed once for each row
    learning_rate: float = 1e-3
    b_ratio: float = 1.0  # learning rate of the matrices B against that of A (LoRA+: Hayou et al. 2024, 2402.12354)
    warmup_steps: int = 20
    batch_rows: int = 32
    soft_weight: float = 0.5  # weight of the teacher's probabilities against its answer
    average_decay: float = 0.98  # decay per step of the averaged adapter, which is the one that is kept
    seed: int = 1
    threads: int = 2
    report_minutes: float = 3.0
    states_mb: int = 3072  # memory for the states of rows below `first_layer`; without room they are computed again


class Progress(msgspec.Struct, frozen=True):
    """A line of the log."""

    step: int
    minutes: float
    rows: int
    loss: float
    held_loss: float | None = None

    @property
    def text(self) -> str:
        """The line for people."""
        held = "" if self.held_loss is None else f", held back {self.held_loss:.4f}"
        return f"step {self.step}, {self.minutes:.1f} min, {self.rows} rows: loss {self.loss:.4f}{held}"


class AdapterTrainer:
    """Owns the adapter, its optimizer and the checkpoint of one run.

    Args:
        vocabulary: The tokens that an answer can have; they alone share the probability. None: all.
    """

    def __init__(
        self, student: Student, plan: AdapterPlan, folder: Path, vocabulary: Collection[int] | None = None
    ) -> None:
        torch.set_num_threads(1)
        self.student, self.plan, self.folder = student, plan, folder
        self.step, self.rows, self.spent_s = 0, 0, 0.0
        self._parameters = [one for one in student.parameters() if one.requires_grad]
        self._average = [one.detach().clone() for one in self._parameters]
        groups = [
            {"params": [one for name, one in student.named_parameters() if name.endswith(end)], "ratio": ratio}
            for end, ratio in ((".a", 1.0), (".b", plan.b_ratio))
        ]
        self._optimizer = torch.optim.AdamW(groups, plan.learning_rate, (0.9, 0.98), weight_decay=0.0)
        known = range(len(student.output)) if vocabulary is None else sorted(vocabulary)
        self._vocabulary = None if vocabulary is None else torch.tensor(known)
        self._place = {token: place for place, token in enumerate(known)}  # of a token among the logits
        self._states: RowStates | None = None
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
        groups = state["optimizer"]["param_groups"]
        if state["shapes"] != shapes or len(groups) != len(self._optimizer.param_groups):
            raise ArtifactError(f"{path} belongs to another student, rank or version: use another folder for this run")
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
        states, batches = self._states_after(prefix), batches_of(self.plan, examples, self.rows)
        with ThreadPoolExecutor(self.plan.threads) as workers:
            while (done := self._done(len(examples))) < 1.0:
                losses.append(self._train_step(states, next(batches), done, workers))
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

    def loss_of(self, examples: Sequence[LearnedAnswer], prefix: tuple[int, ...]) -> float:
        """Return the averaged adapter's mean loss per token of the answers."""
        states = self._states_after(prefix)
        with torch.no_grad(), self.averaged():
            sums = [self._loss(states, part) for part in _parts(examples, math.ceil(len(examples) / 32))]
        return float(sum(sums)) / sum(len(one.answer) for one in examples)

    def _done(self, examples: int) -> float:
        return max(self.spent_s / (60 * self.plan.minutes), self.rows / (self.plan.epochs * examples))

    def _train_step(
        self, states: RowStates, batch: Sequence[Sequence[LearnedAnswer]], done: float, workers: ThreadPoolExecutor
    ) -> float:
        tokens = sum(len(one.answer) for part in batch for one in part)

        def work(part: Sequence[LearnedAnswer]) -> tuple[float, tuple[Tensor, ...]]:
            loss = self._loss(states, part) / tokens
            return loss.item(), torch.autograd.grad(loss, self._parameters)

        results = list(workers.map(work, batch))
        for index, one in enumerate(self._parameters):
            one.grad = torch.stack([gradients[index] for _, gradients in results]).sum(0)
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        warm = min(1.0, (self.step + 1) / self.plan.warmup_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = self.plan.learning_rate * group["ratio"] * warm * max(0.02, 1.0 - done)
        self._optimizer.step()
        self.step, self.rows = self.step + 1, self.rows + sum(map(len, batch))
        share = 1.0 - min(self.plan.average_decay, self.step / (self.step + 10))
        with torch.no_grad():
            for mean, one in zip(self._average, self._parameters, strict=True):
                mean.lerp_(one, share)
        return sum(loss for loss, _ in results)

    def _loss(self, states: RowStates, part: Sequence[LearnedAnswer]) -> Tensor:
        """Return the sum of the losses of the answers' tokens."""
        start = len(states.prefix)
        rows = [(*one.prompt[start:], *one.answer[:-1]) for one in part]
        wanted = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.bool)
        for index, one in enumerate(part):
            first = len(one.prompt) - start - 1
            wanted[index, first : first + len(one.answer)] = True
        logits = self.student.upper(states.of(rows), start, wanted, self._vocabulary).float()
        targets = torch.tensor([self._place[token] for one in part for token in one.answer])
        hard = functional.cross_entropy(logits, targets, reduction="none")
        soft = [(at, pairs) for at, pairs in enumerate(pairs for one in part for pairs in _soft(one)) if pairs]
        if not soft or not self.plan.soft_weight:
            return hard.sum()
        places = torch.tensor([at for at, _ in soft])
        most = max(len(pairs) for _, pairs in soft)
        placed = [[(self._place[token], chance) for token, chance in pairs] for _, pairs in soft]
        padded = torch.tensor([[*pairs, *[(0, 0.0)] * (most - len(pairs))] for pairs in placed])  # [places, most, 2]
        tokens, chances = padded[..., 0].long(), padded[..., 1]
        logprobs = functional.log_softmax(logits[places], -1).gather(1, tokens)
        divergence = (torch.xlogy(chances, chances) - chances * logprobs).sum(-1)  # over the likeliest tokens
        return hard.index_add(0, places, self.plan.soft_weight * (divergence - hard[places])).sum()

    def _states_after(self, prefix: tuple[int, ...]) -> RowStates:
        if self._states is None or self._states.prefix != prefix:
            self._states = RowStates(self.student, prefix, self.plan.states_mb << 20)
        return self._states

    def _set(self, values: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for one, new in zip(self._parameters, values, strict=True):
                one.copy_(new)


def batches_of(
    plan: AdapterPlan, examples: Sequence[LearnedAnswer], seen: int
) -> Iterator[list[Sequence[LearnedAnswer]]]:
    """Yield the parts of each batch after `seen` rows, in an order that depends only on plan and examples.

    The rows of a part have similar lengths.
    """
    epoch, seen = divmod(seen, len(examples))
    while True:
        draw = random.Random(f"{plan.seed} {epoch}")
        order = draw.sample(examples, len(examples))
        for start in range(0, len(order), sorted_rows := _SORTED_BATCHES * plan.batch_rows):
            rows = order[start : start + sorted_rows]
            parts = _parts(rows, math.ceil(len(rows) * plan.threads / plan.batch_rows))
            draw.shuffle(parts)
            for first in range(0, len(parts), plan.threads):
                batch = parts[first : first + plan.threads]
                seen -= sum(map(len, batch))
                if seen < 0:
                    yield batch
        epoch, seen = epoch + 1, 0


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
