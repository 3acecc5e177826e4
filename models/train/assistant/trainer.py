"""The training loop: time-boxed, checkpointed, resumable, on a CPU or a GPU.

Progress is the larger share spent of minutes and of steps, so that a run on a busy machine still ends its schedule in
time.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from torch.nn import functional

from ...catalog.artifact import ArtifactError
from ..auxiliary_losses.attention_loss import NOWHERE
from ..auxiliary_losses.embedding_loss import EmbeddingProjection, SentenceEmbeddings
from ..auxiliary_losses.function_distillation import with_hints
from ..auxiliary_losses.tagging_loss import SlotTagger
from ..network.llama import AuxiliaryOutputs, Llama, LlamaConfig
from ..network.optimizer import Optimizers
from .mixture import COPIED, HINTED, REFUSED, Example

CHECKPOINT = "checkpoint.pt"
LONGEST_STEP_S = 30.0  # what takes longer was a machine asleep or a run on hold, not training
# The teacher answers what the student should turn away; copying needs no teacher, and hints have one.
UNTAUGHT = (REFUSED, COPIED, HINTED)


class TrainingPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long and how fast to train. The rate rises over `warmup_steps`, stays, and falls linearly over the last
    `cooldown`.
    """

    minutes: float
    steps: int = 1_000_000
    tokens: int = 4096  # padded, per batch
    matrix_lr: float = 0.01
    vector_lr: float = 1.5e-3
    warmup_steps: int = 50
    cooldown: float = 0.9  # share of the run
    dropout: float = 0.1
    seed: int = 1
    threads: int = 2
    report_minutes: float = 3.0
    teacher_weight: float = 0.0  # of the teacher's probabilities against the labels
    pointing: float = 0.3  # weight of the attention lesson (`pointing`)
    meaning: float = 0.5  # weight of the lesson in meaning (`meaning`), where there is an encoder
    tagging: float = 0.5  # weight of the lesson which word belongs to which argument (`tagging`)
    averaged: float = 0.998  # decay, per step, of the running mean of the weights; the mean is what is kept
    refusals: int = 6000  # of the device's examples, in an epoch
    repeats: int = 2  # how often an epoch has each row of HWU64, which has fewer rows and more to learn
    share: float = 1.0  # of the large model's rows, in an epoch
    hinted: int = 60_000  # of a tutor's hints (`hints`), in an epoch, where there are any


class Trainer:
    """Owns network, optimizers and the checkpoint file of one run."""

    def __init__(
        self,
        network: Llama,
        plan: TrainingPlan,
        folder: Path,
        device: str = "cpu",
        teacher: Llama | None = None,
        meanings: SentenceEmbeddings | None = None,
        labels: int = 0,
    ) -> None:
        """`labels`: how many the lesson in tagging tells apart; 0: it is left out."""
        torch.manual_seed(plan.seed)
        torch.set_num_threads(plan.threads)
        self._teacher = teacher.to(device).eval() if teacher else None
        self.network, self.plan, self.folder, self.device = network.to(device), plan, folder, device
        self.step, self.spent_s = 0, 0.0
        self.average = deepcopy(self.network).eval()
        self._reader = EmbeddingProjection(network.shape.width, meanings).to(device) if meanings else None
        self._tagger = SlotTagger(network.shape.width, labels).to(device) if labels and plan.tagging else None
        self._optimizers = Optimizers(network, plan.matrix_lr, plan.vector_lr, (self._reader, self._tagger))
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def progress(self) -> float:
        return min(1.0, max(self.spent_s / (60 * self.plan.minutes), self.step / self.plan.steps))

    def resume(self) -> bool:
        """Take up the last checkpoint, if there is one. Raises ArtifactError if it is of a network of another shape."""
        path = self.folder / CHECKPOINT
        if not path.is_file():
            return False
        state = torch.load(path, map_location=self.device, weights_only=True)
        if state["shape"] != (shape := msgspec.to_builtins(self.network.shape)):
            raise ArtifactError(f"{path} is of {state['shape']}, not of {shape}: give this run another folder")
        self.network.load_state_dict(state["network"])
        self.average.load_state_dict(state["average"])
        if self._reader:
            self._reader.load_state_dict(state["reader"])
        if self._tagger:
            self._tagger.load_state_dict(state["tagger"])
        self._optimizers.load_state_dict(state["optimizers"])
        self.step, self.spent_s = state["step"], state["spent_s"]
        return True

    def run(self, epoch: Callable[[], list[Example]], report: Callable[[Trainer, float], None]) -> None:
        """Train until the plan is spent; `report(trainer, loss)` comes every few minutes, after each checkpoint."""
        draw = random.Random(self.plan.seed + self.step)
        last, losses, reported = time.monotonic(), [], self.spent_s
        while self.progress < 1.0:
            for batch in batches(epoch(), self.plan.tokens, draw):
                losses.append(self._learn(batch))
                now = time.monotonic()
                self.spent_s, last = self.spent_s + min(now - last, LONGEST_STEP_S), now
                if self.spent_s - reported > 60 * self.plan.report_minutes or self.progress >= 1.0:
                    reported = self.spent_s
                    self.save()
                    report(self, float(torch.stack(losses).mean()))
                    losses.clear()
                    last = time.monotonic()  # validation is not training time
                if self.progress >= 1.0:
                    return

    def save(self) -> None:
        state = {
            "network": self.network.state_dict(),
            "average": self.average.state_dict(),
            "reader": self._reader.state_dict() if self._reader else {},
            "tagger": self._tagger.state_dict() if self._tagger else {},
            "optimizers": self._optimizers.state_dict(),
            "step": self.step,
            "spent_s": self.spent_s,
            "shape": msgspec.to_builtins(self.network.shape),
        }
        partial = self.folder / f"{CHECKPOINT}.partial"
        torch.save(state, partial)
        partial.replace(self.folder / CHECKPOINT)
        _trim_heap()

    def _learn(self, batch: Sequence[Example]) -> Tensor:
        self.network.train()
        loss = self._loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizers.step(self._factor())
        self.step += 1
        self._remember()
        return loss.detach()

    def _loss(self, batch: Sequence[Example]) -> Tensor:
        with autocast(self.device):
            seen = AuxiliaryOutputs()
            logits, wanted = answer_logits(self.network, batch, self.device, seen)
        lessons = self._lessons(batch, seen)
        hard = functional.cross_entropy(logits.float(), wanted, reduction="none")  # [targets]
        hard = with_hints(hard, logits, hints(batch))
        taught = [one for one in batch if one.source not in UNTAUGHT]
        if self._teacher is None or not taught:
            return hard.mean() + lessons
        with torch.no_grad(), autocast(self.device):
            told, _ = answer_logits(self._teacher, taught, self.device)
        kept = torch.tensor([one.source not in UNTAUGHT for one in batch for _ in one.target], device=self.device)
        soft = functional.kl_div(logits[kept].float().log_softmax(-1), told.float().softmax(-1), reduction="none").sum(
            -1
        )
        weight = self.plan.teacher_weight
        return (hard.sum() - weight * hard[kept].sum() + weight * soft.sum()) / len(hard) + lessons

    def _lessons(self, batch: Sequence[Example], seen: AuxiliaryOutputs) -> Tensor:
        """What is taught beside the answers: where to look, what the utterance means, which word belongs to what."""
        loss = self.plan.pointing * looked(batch, seen.scores)
        if self._reader:
            loss = loss + self.plan.meaning * self._reader.loss(seen.states, [one.meaning for one in batch])
        if self._tagger:
            tagged = [(len(one.prompt) - 1 - len(one.tags), one.tags) for one in batch]
            loss = loss + self.plan.tagging * self._tagger.loss(seen.middle, tagged)
        return loss

    @torch.no_grad()
    def _remember(self) -> None:
        """Weights averaged over the last steps answer better than the last ones do, above all before the rate has
        fallen (Izmailov et al. 2018, arXiv 1803.05407). Early on the mean reaches back over half the steps at most.
        """
        share = 1.0 - min(self.plan.averaged, self.step / (self.step + 2))
        for mean, weight in zip(self.average.parameters(), self.network.parameters(), strict=True):
            mean.lerp_(weight, share)

    def _factor(self) -> float:
        warm = min(1.0, (self.step + 1) / self.plan.warmup_steps)
        return warm * min(1.0, (1.0 - self.progress) / self.plan.cooldown + 0.01)


def _trim_heap() -> None:
    """Batches of many sizes leave holes in glibc's heap: 8 GB in an hour, of which 2 are in use. Other C libraries have
    no such call.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def load_network(path: Path, dropout: float = 0.0) -> Llama:
    """The network of a checkpoint, its averaged weights. Only tensors and numbers are read, nothing is executed."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    network = Llama(msgspec.convert(state["shape"], LlamaConfig), dropout)
    network.load_state_dict(state.get("average") or state["network"])
    return network


def batches(examples: Sequence[Example], tokens: int, draw: random.Random) -> Iterator[list[Example]]:
    """Batches of at most `tokens` padded tokens, of about equal lengths, in random order."""
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


def hints(batch: Sequence[Example]) -> list[tuple[int, list[tuple[int, float]]]]:
    """The hints of a batch, and where among its targets the tokens are that they are for."""
    found, at = [], 0
    for one in batch:
        found += [(at + hint.place, hint.shares) for hint in one.hints]
        at += len(one.target)
    return found


def answer_logits(
    network: Llama, batch: Sequence[Example], device: str = "cpu", seen: AuxiliaryOutputs | None = None
) -> tuple[Tensor, Tensor]:
    """Logits [targets, vocabulary] at the answers' positions only, and the wanted ids [targets]. `seen` is
    filled where given.
    """
    length = max(len(one.prompt) + len(one.target) for one in batch) - 1
    length += -length % 8
    ids = torch.zeros(len(batch), length, dtype=torch.long)
    places: list[int] = []
    wanted: list[int] = []
    for row, one in enumerate(batch):
        whole = one.prompt + one.target[:-1]
        ids[row, : len(whole)] = torch.tensor(whole)
        first = row * length + len(one.prompt) - 1
        places.extend(range(first, first + len(one.target)))
        wanted.extend(one.target)
    hidden = network.hidden(ids.to(device), seen).flatten(0, 1)
    if seen:
        firsts = [row * length + len(one.prompt) - 1 for row, one in enumerate(batch)]
        seen.states = hidden[torch.tensor(firsts, device=device)]
    return network.logits(hidden[torch.tensor(places, device=device)]), torch.tensor(wanted, device=device)


def looked(batch: Sequence[Example], seen: Sequence[Tensor]) -> Tensor:
    """Cross entropy of where the pointing heads look, [n, length, length] each, against where they should; 0 where a
    batch teaches nothing.
    """
    lessons = [
        (row, len(one.prompt) - 1 + at, look)
        for row, one in enumerate(batch)
        for at, look in enumerate(one.looks)
        if look != NOWHERE
    ]
    if not lessons:
        return torch.zeros(())
    rows, at, looks = torch.tensor(lessons, device=seen[0].device).unbind(1)
    losses = [functional.cross_entropy(scores[rows, at].float(), looks) for scores in seen]
    return torch.stack(losses).mean()


@torch.no_grad()
def right_answers(network: Llama, examples: Sequence[Example], device: str = "cpu") -> tuple[float, float]:
    """(share with the right second token, share with every token right): greedy decoding would give the same
    answers.
    """
    network.eval()
    names, whole = 0, 0
    for batch in batches(examples, 8192, random.Random(0)):
        with autocast(device):
            logits, wanted = answer_logits(network, batch, device)
        right = (logits.argmax(-1) == wanted).split([len(one.target) for one in batch])  # type: ignore[no-untyped-call]
        names += sum(bool(one[:2].all()) for one in right)
        whole += sum(bool(one.all()) for one in right)
    return names / len(examples), whole / len(examples)


def autocast(device: str) -> AbstractContextManager[None]:
    return torch.autocast(device, dtype=torch.bfloat16)
