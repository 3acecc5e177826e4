"""The training loop: it has a time limit, writes checkpoints, can be resumed, and runs on a CPU or a GPU.

Progress is the larger of the shares of minutes and of steps used, so that a run on a busy machine still completes its
schedule in time.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from torch.nn import functional

from causeway_server.models.catalog.artifact import ArtifactError

from ..auxiliary_losses.embedding_loss import EmbeddingProjection, SentenceEmbeddings
from ..auxiliary_losses.function_distillation import soften
from ..auxiliary_losses.tagging_loss import SlotTagger
from ..network.llama import AuxiliaryOutputs, Llama, LlamaConfig
from ..network.optimizer import Optimizers
from .batches import answer_logits, attention_loss, autocast, batches, soft_targets
from .mixture import COPYING, REFUSED, SOFT_LABELLED, Example

CHECKPOINT = "checkpoint.pt"
MAX_STEP_S = 30.0  # a longer step is counted as this long: the machine slept or the run was paused
# Sources that are not distilled: the teacher answers what the student should refuse, copying exercises need no teacher,
# and soft labels have their own.
NOT_DISTILLED = (REFUSED, COPYING, SOFT_LABELLED)


class TrainingPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Training schedule and weights of the losses.

    The learning rate rises over `warmup_steps`, is constant, and falls linearly over the last `cooldown`.
    """

    minutes: float
    steps: int = 1_000_000
    batch_tokens: int = 4096  # tokens per batch, padding included
    matrix_lr: float = 0.01
    vector_lr: float = 1.5e-3
    warmup_steps: int = 50
    cooldown: float = 0.9  # share of the run over which the learning rate falls
    dropout: float = 0.1
    seed: int = 1
    threads: int = 2
    report_minutes: float = 3.0
    teacher_weight: float = 0.0  # weight of the teacher's probabilities against the labels
    attention_weight: float = 0.3  # weight of the attention loss
    embedding_weight: float = 0.5  # weight of the embedding loss, if there is an encoder or a function teacher
    tagging_weight: float = 0.5  # weight of the slot-tagging loss
    ema_decay: float = 0.998  # decay per step of the averaged weights, which are the ones that are exported
    refusals: int = 6000  # examples to refuse in an epoch of the device's model
    hwu64_repeats: int = 2  # how often an epoch holds each row of HWU64, which has fewer rows and more functions
    row_share: float = 1.0  # share of the rows in an epoch of the large model
    soft_labels: int = 60_000  # soft-labelled texts in an epoch, if there is a function teacher


class Trainer:
    """Owns the network, the optimizers and the checkpoint of one run."""

    def __init__(
        self,
        network: Llama,
        plan: TrainingPlan,
        folder: Path,
        device: str = "cpu",
        teacher: Llama | None = None,
        embeddings: SentenceEmbeddings | None = None,
        slot_labels: int = 0,
    ) -> None:
        """Prepare a run in `folder`.

        Args:
            teacher: network to distil from.
            embeddings: vectors for the embedding loss; None leaves it out.
            slot_labels: number of labels of the tagging loss; 0 leaves it out.
        """
        torch.manual_seed(plan.seed)
        torch.set_num_threads(plan.threads)
        self._teacher = teacher.to(device).eval() if teacher else None
        self.network, self.plan, self.folder, self.device = network.to(device), plan, folder, device
        self.step, self.spent_s = 0, 0.0
        self.averaged = deepcopy(self.network).eval()
        self._projection = EmbeddingProjection(network.shape.width, embeddings).to(device) if embeddings else None
        tagging = slot_labels and plan.tagging_weight
        self._tagger = SlotTagger(network.shape.width, slot_labels).to(device) if tagging else None
        self._optimizers = Optimizers(network, plan.matrix_lr, plan.vector_lr, (self._projection, self._tagger))
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def progress(self) -> float:
        """Share of the plan that is done, 0..1."""
        return min(1.0, max(self.spent_s / (60 * self.plan.minutes), self.step / self.plan.steps))

    def resume(self) -> bool:
        """Load the last checkpoint; return whether there was one.

        Raises:
            ArtifactError: the checkpoint is of a network of another shape.
        """
        path = self.folder / CHECKPOINT
        if not path.is_file():
            return False
        state = torch.load(path, map_location=self.device, weights_only=True)
        if state["shape"] != (shape := msgspec.to_builtins(self.network.shape)):
            raise ArtifactError(f"{path} has the shape {state['shape']}, not {shape}: use another folder for this run")
        self.network.load_state_dict(state["network"])
        self.averaged.load_state_dict(state["averaged"])
        if self._projection:
            self._projection.load_state_dict(state["projection"])
        if self._tagger:
            self._tagger.load_state_dict(state["tagger"])
        self._optimizers.load_state_dict(state["optimizers"])
        self.step, self.spent_s = state["step"], state["spent_s"]
        return True

    def run(self, epoch: Callable[[], list[Example]], report: Callable[[Trainer, float], None]) -> None:
        """Train until the plan is done.

        Args:
            epoch: returns the examples of the next epoch.
            report: called every `plan.report_minutes`, after a checkpoint, with the mean loss since the last one.
        """
        draw = random.Random(self.plan.seed + self.step)
        last, losses, reported = time.monotonic(), [], self.spent_s
        while self.progress < 1.0:
            for batch in batches(epoch(), self.plan.batch_tokens, draw):
                losses.append(self._train_step(batch))
                now = time.monotonic()
                self.spent_s, last = self.spent_s + min(now - last, MAX_STEP_S), now
                if self.spent_s - reported > 60 * self.plan.report_minutes or self.progress >= 1.0:
                    reported = self.spent_s
                    self.save()
                    report(self, float(torch.stack(losses).mean()))
                    losses.clear()
                    last = time.monotonic()  # validation is not training time
                if self.progress >= 1.0:
                    return

    def save(self) -> None:
        """Write the checkpoint, atomically."""
        state = {
            "network": self.network.state_dict(),
            "averaged": self.averaged.state_dict(),
            "projection": self._projection.state_dict() if self._projection else {},
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

    def _train_step(self, batch: Sequence[Example]) -> Tensor:
        self.network.train()
        loss = self.loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizers.step(self._lr_factor())
        self.step += 1
        self._update_average()
        return loss.detach()

    def loss(self, batch: Sequence[Example]) -> Tensor:
        """Return the loss of a batch: next tokens of the answers, distillation, and the auxiliary losses."""
        with autocast(self.device):
            outputs = AuxiliaryOutputs()
            logits, targets = answer_logits(self.network, batch, self.device, outputs)
        auxiliary = self._auxiliary_loss(batch, outputs)
        hard = functional.cross_entropy(logits.float(), targets, reduction="none")  # [targets]
        hard = soften(hard, logits, soft_targets(batch))
        distilled = [one for one in batch if one.source not in NOT_DISTILLED]
        if self._teacher is None or not distilled:
            return hard.mean() + auxiliary
        with torch.no_grad(), autocast(self.device):
            teacher_logits, _ = answer_logits(self._teacher, distilled, self.device)
        mask = torch.tensor([one.source not in NOT_DISTILLED for one in batch for _ in one.target], device=self.device)
        logprobs, probabilities = logits[mask].float().log_softmax(-1), teacher_logits.float().softmax(-1)
        soft = functional.kl_div(logprobs, probabilities, reduction="none").sum(-1)
        weight = self.plan.teacher_weight
        return (hard.sum() - weight * hard[mask].sum() + weight * soft.sum()) / len(hard) + auxiliary

    def _auxiliary_loss(self, batch: Sequence[Example], outputs: AuxiliaryOutputs) -> Tensor:
        loss = self.plan.attention_weight * attention_loss(batch, outputs.attention_scores)
        if self._projection:
            indices = [one.embedding for one in batch]
            loss = loss + self.plan.embedding_weight * self._projection.loss(outputs.answer_states, indices)
        if self._tagger:
            tagged = [(len(one.prompt) - 1 - len(one.slot_tags), one.slot_tags) for one in batch]
            loss = loss + self.plan.tagging_weight * self._tagger.loss(outputs.middle_states, tagged)
        return loss

    @torch.no_grad()
    def _update_average(self) -> None:
        """Update the exponential moving average of the weights.

        It answers better than the last weights, especially before the learning rate has fallen (Izmailov et al. 2018,
        arXiv 1803.05407). Early in a run it covers at most half of the steps.
        """
        share = 1.0 - min(self.plan.ema_decay, self.step / (self.step + 2))
        for mean, weight in zip(self.averaged.parameters(), self.network.parameters(), strict=True):
            mean.lerp_(weight, share)

    def _lr_factor(self) -> float:
        warm = min(1.0, (self.step + 1) / self.plan.warmup_steps)
        return warm * min(1.0, (1.0 - self.progress) / self.plan.cooldown + 0.01)


def _trim_heap() -> None:
    """Return free memory to the system.

    Batches of many sizes fragment glibc's heap: 8 GB in an hour, of which 2 GB are in use. Other C libraries have no
    such call.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def load_network(path: Path, dropout: float = 0.0) -> Llama:
    """Return the network of a checkpoint with its averaged weights. Only tensors and numbers are unpickled."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    network = Llama(msgspec.convert(state["shape"], LlamaConfig), dropout)
    network.load_state_dict(state.get("averaged") or state["network"])
    return network
