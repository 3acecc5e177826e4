"""Training, distillation and export of the two assistants.

A run is a folder:

    tokenizer.json            the tokenizer
    plan.json                 a `RunConfig`
    checkpoint.pt             weights and optimizer state
    log.jsonl                 one line per report: step, minutes, loss, accuracy by source
    function_teacher.pt, soft_labels.json, embedding_texts.json, sentence_embeddings.npy
                              with --minilm or --encoder (auxiliary_losses)
    pseudo_labels.jsonl       of distil: the teacher's answers to unlabelled rows
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from causeway_server.models.catalog.artifact import ArtifactError

from ..auxiliary_losses.embedding_loss import SentenceEmbeddings
from ..auxiliary_losses.function_distillation import FunctionSoftLabels
from ..auxiliary_losses.tagging_loss import SlotLabels
from ..data.pseudo_labels import label, save_rows, unlabelled
from ..export.gguf_reader import read_network
from ..export.gguf_writer import GGUFMetadata, write_gguf
from ..function_calls.dataset import Row, read_rows
from ..function_calls.intents import LABELLED
from ..network.induction_heads import supports_induction_heads, tie_space_variants, write_induction_heads
from ..network.llama import Llama, LlamaConfig, grow
from ..network.tokenizer import AssistantTokenizer
from .batches import answer_accuracy, batches
from .importance import importance, save_importance
from .mixture import Corpus, Mixture, validation_examples
from .trainer import CHECKPOINT, Trainer, TrainingPlan, load_network

TOKENIZER, PLAN, LOG, PSEUDO_LABELS = "tokenizer.json", "plan.json", "log.jsonl", "pseudo_labels.jsonl"
STUDENT, TEACHER = "assistant", "assistant-large"
MERGES = 1700
LAYERS = {STUDENT: 4, TEACHER: 12}
DESCRIPTIONS = {
    STUDENT: "Device commands to function calls in JSON; refuses everything else with <|refuse|>",
    TEACHER: "Utterances to function calls in JSON over the whole catalogue",
}


class RunConfig(msgspec.Struct, frozen=True):
    """The settings with which a run was started, stored beside its checkpoint."""

    name: str
    plan: TrainingPlan
    shape: LlamaConfig
    grown_from: str | None = None
    started_from: str | None = None
    teacher: str | None = None


def shape_for(name: str, layers: int | None, width: int) -> dict[str, int]:
    """Return the sizes of a network, except its vocabulary: heads of width 64, and a hidden layer three times as wide
    as the network.
    """
    return {"layers": layers or LAYERS[name], "width": width, "heads": width // 64, "hidden": 3 * width}


def train(
    name: str,
    data: Path,
    folder: Path,
    plan: TrainingPlan,
    *,
    shape: dict[str, int] | None = None,
    grow_from: Path | None = None,
    start: Path | None = None,
    repeat_prompt: bool = True,
    merges: int = MERGES,
    encoder: Path | None = None,
    minilm: Path | None = None,
    progress: Callable[[str], None] = print,
) -> Trainer:
    """Train an assistant in the run `folder`, or resume it.

    Args:
        name: assistant (the device's, with refusals) or assistant-large (the whole catalogue).
        data: folder with intents/*.jsonl and routing/*.jsonl.
        shape: sizes of the network; with `grow_from` or `start`, only those that differ.
        grow_from: run of a shallower network of the same width to start from, with its tokenizer.
        start: published GGUF to start from, with its tokenizer.
        repeat_prompt: whether prompts repeat the last message (`AssistantTokenizer.prompt`); a run's own tokenizer and
            that of `grow_from` override it.
        encoder: ONNX sentence encoder for the embedding loss.
        minilm: folder of a published sentence encoder: train a function teacher from it, for soft labels and for the
            embedding loss.

    Returns:
        the trainer after the last step.

    Raises:
        ArtifactError: `start` is not a GGUF written by `export`, the shapes do not fit, or the run has another shape.
    """
    corpus = Corpus.read(data)
    small: Llama | None = None
    if start:
        small, start_tokenizer = read_network(start, repeat_prompt)
        folder.mkdir(parents=True, exist_ok=True)
        start_tokenizer.save(folder / TOKENIZER)
    elif grow_from:
        small = load_network(grow_from / CHECKPOINT)
    tokenizer = _load_or_train_tokenizer(corpus, folder, grow_from, merges, repeat_prompt)
    if small:
        network = grow(small, msgspec.structs.replace(small.shape, **(shape or {})), plan.dropout)
    else:
        network = _new_network(_config(name, tokenizer, shape), tokenizer, plan)
    origin = {"grown_from": str(grow_from) if grow_from else None, "started_from": str(start) if start else None}
    config = RunConfig(name, plan, network.shape, **origin)
    torch.set_num_threads(plan.threads)
    soft_labels, embeddings = None, None
    if minilm:
        soft_labels = FunctionSoftLabels.load_or_make(
            minilm, corpus.train, corpus.functions(), folder, seed=plan.seed, progress=progress
        )
        embeddings = soft_labels.embeddings
    elif encoder:
        embeddings = SentenceEmbeddings.load_or_compute(encoder, [row.text for row in corpus.train], folder)
    return _run(config, corpus, tokenizer, network, folder, progress, embeddings=embeddings, soft_labels=soft_labels)


def distill(
    data: Path,
    folder: Path,
    plan: TrainingPlan,
    *,
    teacher: Path,
    student: Path | None = None,
    shape: dict[str, int] | None = None,
    progress: Callable[[str], None] = print,
) -> Trainer:
    """Distil the device's model from the run `teacher`, or resume it.

    The student learns the teacher's probabilities on every token (Hinton et al. 2015, arXiv 1503.02531), and its
    answers to rows without argument labels (Kim and Rush 2016, arXiv 1606.07947). It uses the teacher's tokenizer.

    Args:
        student: run to start from, with the same tokenizer.
        shape: sizes of a new network.
    """
    corpus = Corpus.read(data)
    tokenizer = _load_or_train_tokenizer(corpus, folder, teacher, MERGES)
    pseudo_labelled = _pseudo_labels(corpus, folder, teacher, plan.threads)
    corpus = msgspec.structs.replace(corpus, pseudo_labelled=pseudo_labelled)
    if student:
        network = load_network(student / CHECKPOINT, plan.dropout)
    else:
        network = _new_network(_config(STUDENT, tokenizer, shape), tokenizer, plan)
    config = RunConfig(STUDENT, plan, network.shape, grown_from=str(student) if student else None, teacher=str(teacher))
    return _run(config, corpus, tokenizer, network, folder, progress, load_network(teacher / CHECKPOINT))


def export_run(folder: Path, target: Path) -> None:
    """Write a run's network and tokenizer as an F32 GGUF."""
    name = msgspec.json.decode((folder / PLAN).read_bytes(), type=RunConfig).name
    network = load_network(folder / CHECKPOINT)
    metadata = GGUFMetadata(f"causeway-{name}", DESCRIPTIONS[name], refuses=name == STUDENT)
    write_gguf(network, AssistantTokenizer.load(folder / TOKENIZER), target, metadata)


def write_importance(folder: Path, data: Path, target: Path, count: int, seed: int) -> None:
    """Write the importance matrix of a run's network over `count` training examples."""
    config = msgspec.json.decode((folder / PLAN).read_bytes(), type=RunConfig)
    corpus, tokenizer = Corpus.read(data), AssistantTokenizer.load(folder / TOKENIZER)
    examples = Mixture(corpus, tokenizer, config.name == STUDENT, seed).epoch()[:count]
    chosen = list(batches(examples, config.plan.batch_tokens, random.Random(seed)))
    save_importance(importance(load_network(folder / CHECKPOINT), chosen), target)


def _run(
    config: RunConfig,
    corpus: Corpus,
    tokenizer: AssistantTokenizer,
    network: Llama,
    folder: Path,
    progress: Callable[[str], None],
    teacher: Llama | None = None,
    embeddings: SentenceEmbeddings | None = None,
    soft_labels: FunctionSoftLabels | None = None,
) -> Trainer:
    _check_names(tokenizer, corpus, folder / TOKENIZER)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    slot_labels = SlotLabels(corpus.arguments())
    trainer = Trainer(network, config.plan, folder, device, teacher, embeddings, slot_labels.count)
    resumed = trainer.resume()
    (folder / PLAN).write_bytes(msgspec.json.encode(config))
    student, plan = config.name == STUDENT, config.plan
    mixture = Mixture(
        corpus,
        tokenizer,
        student,
        plan.seed + 1000 * trainer.step,  # a resumed run draws other variants
        refusals=plan.refusals,
        hwu64_repeats=plan.hwu64_repeats,
        row_share=plan.row_share,
        embeddings=embeddings,
        slot_labels=slot_labels,
        soft_labels=soft_labels,
        soft_label_count=plan.soft_labels,
    )
    validation = validation_examples(corpus, tokenizer, student, per_source=500)
    parameters = sum(weight.numel() for weight in network.parameters())
    state = f"resumed at step {trainer.step}" if resumed else "new"
    progress(f"{config.name}: {parameters:,} parameters, vocabulary {tokenizer.size}, {state}")

    def report(trainer: Trainer, loss: float) -> None:
        shares = {
            name: answer_accuracy(trainer.averaged, rows, trainer.device) for name, rows in validation.items() if rows
        }
        entry = {"step": trainer.step, "minutes": trainer.spent_s / 60, "loss": loss, "accuracy": shares}
        with (folder / LOG).open("ab") as log:
            log.write(msgspec.json.encode(entry) + b"\n")
        table = "  ".join(f"{name} {intent:.3f}/{exact:.3f}" for name, (intent, exact) in shares.items())
        progress(f"step {trainer.step}  {trainer.spent_s / 60:.1f} min  loss {loss:.4f}  {table}")

    trainer.run(mixture.epoch, report)
    return trainer


def _check_names(tokenizer: AssistantTokenizer, corpus: Corpus, path: Path) -> None:
    """Raise ArtifactError before the training starts if the tokenizer was made from other data and lacks a name of
    `corpus`.
    """
    missing = tokenizer.missing(corpus.functions(), corpus.arguments())
    if missing:
        listed = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise ArtifactError(
            f"{path}: the tokenizer has no token for {listed}, because it was made from other data. Leave "
            "out the rows with these names, or train a new run without --from and --grow-from"
        )


def _config(name: str, tokenizer: AssistantTokenizer, shape: dict[str, int] | None) -> LlamaConfig:
    return LlamaConfig(vocabulary=tokenizer.size, **(shape or shape_for(name, None, 256)))


def _pseudo_labels(corpus: Corpus, folder: Path, teacher: Path, threads: int) -> tuple[Row, ...]:
    """Return the teacher's pseudo-labels. They are computed once and cached in the run's folder."""
    path = folder / PSEUDO_LABELS
    if not path.is_file():
        weights = folder / "teacher.gguf"
        export_run(teacher, weights)
        save_rows(label(weights, unlabelled(corpus.train), threads), path)
        weights.unlink()
    return read_rows(path, LABELLED)


def _load_or_train_tokenizer(
    corpus: Corpus, folder: Path, origin: Path | None, merges: int, repeat_prompt: bool = True
) -> AssistantTokenizer:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / TOKENIZER
    if not path.is_file():
        if origin:
            tokenizer = AssistantTokenizer.load(origin / TOKENIZER)
        else:
            tokenizer = AssistantTokenizer.train(
                corpus.tokenizer_texts(), corpus.functions(), corpus.arguments(), merges, repeat_prompt
            )
        tokenizer.save(path)
    return AssistantTokenizer.load(path)


def _new_network(shape: LlamaConfig, tokenizer: AssistantTokenizer, plan: TrainingPlan) -> Llama:
    torch.manual_seed(plan.seed)
    network = Llama(shape, plan.dropout)
    tie_space_variants(network.embedding, tokenizer.bpe.get_vocab())
    if supports_induction_heads(network):
        write_induction_heads(network)
    return network
