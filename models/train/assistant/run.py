"""Train, distil and export the two assistants. A run is a folder: tokenizer, plan, checkpoint, log."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from ...function_calls.dataset import Row, read_rows
from ...function_calls.intents import LABELLED
from ..auxiliary_losses.embedding_loss import SentenceEmbeddings
from ..auxiliary_losses.function_distillation import FunctionHints
from ..auxiliary_losses.tagging_loss import SlotLabels
from ..data.pseudo_labels import label, save, unlabelled
from ..export.gguf_reader import start_from
from ..export.gguf_writer import GGUFMetadata, write_gguf
from ..network.induction_heads import can_copy_by_hand, tie_spaced_twins, write_copying
from ..network.llama import Llama, LlamaConfig, grown
from ..network.tokenizer import AssistantTokenizer
from .importance import importance
from .importance import save as save_importance
from .mixture import Corpus, Mixture, validation_examples
from .trainer import CHECKPOINT, Trainer, TrainingPlan, batches, load_network, right_answers

TOKENIZER, PLAN, LOG, LABELS = "tokenizer.json", "plan.json", "log.jsonl", "labels.jsonl"
STUDENT, TEACHER = "assistant", "assistant-large"
MERGES = 1700
LAYERS = {STUDENT: 4, TEACHER: 12}
ABOUT = {
    STUDENT: "Device commands to function calls in JSON; refuses everything else with <|refuse|>",
    TEACHER: "Utterances to function calls in JSON over the whole catalogue",
}


class RunConfig(msgspec.Struct, frozen=True):
    """What a run was started with, kept beside its checkpoint."""

    name: str
    plan: TrainingPlan
    shape: LlamaConfig
    grown_from: str | None = None
    started_from: str | None = None
    teacher: str | None = None


def shape_for(name: str, layers: int | None, width: int, hidden: int | None = None) -> dict[str, int]:
    """Sizes without the vocabulary: heads of 64, a hidden layer three times as wide."""
    return {"layers": layers or LAYERS[name], "width": width, "heads": width // 64, "hidden": hidden or 3 * width}


def train(
    name: str,
    data: Path,
    folder: Path,
    plan: TrainingPlan,
    *,
    shape: dict[str, int] | None = None,
    grow_from: Path | None = None,
    start: Path | None = None,
    read_twice: bool = True,
    merges: int = MERGES,
    encoder: Path | None = None,
    minilm: Path | None = None,
    say: Callable[[str], None] = print,
) -> Trainer:
    """Train `name` (assistant: the device's, with refusals; assistant-large: the whole catalogue), or go on with it.

    `grow_from` is the run of a shallower network of the same width; its tokenizer is used too. `start` is a
    published GGUF to go on from in the same way; `shape` then holds no more than what is to be different. `encoder` is
    a sentence encoder (ONNX) to learn meanings from (`meaning`); `minilm` is the folder of a published one, to make a
    tutor of, for functions and meanings (`hints`). Whether an utterance is read twice (`Vocabulary.prompt`) goes with
    the tokenizer; `read_twice` says it where that is not a run's own.
    """
    corpus = Corpus.read(data)
    small: Llama | None = None
    if start:
        small, given = start_from(start, read_twice)
        folder.mkdir(parents=True, exist_ok=True)
        given.save(folder / TOKENIZER)
    elif grow_from:
        small = load_network(grow_from / CHECKPOINT)
    vocabulary = _vocabulary(corpus, folder, grow_from, merges, read_twice)
    if small:
        network = grown(small, msgspec.structs.replace(small.shape, **(shape or {})), plan.dropout)
    else:
        network = _fresh(_sized(name, vocabulary, shape), vocabulary, plan)
    origin = {"grown_from": str(grow_from) if grow_from else None, "started_from": str(start) if start else None}
    recipe = RunConfig(name, plan, network.shape, **origin)
    torch.set_num_threads(plan.threads)
    names = corpus.functions()
    hints, meanings = None, None
    if minilm:
        hints = FunctionHints.of(minilm, corpus.train, names, folder, seed=plan.seed, say=say)
        meanings = hints.meanings
    elif encoder:
        meanings = SentenceEmbeddings.of(encoder, _spoken(corpus), folder)
    return _run(recipe, corpus, vocabulary, network, folder, say, meanings=meanings, hints=hints)


def distill(
    data: Path,
    folder: Path,
    plan: TrainingPlan,
    *,
    teacher: Path,
    student: Path | None = None,
    shape: dict[str, int] | None = None,
    say: Callable[[str], None] = print,
) -> Trainer:
    """Teach the device's model by the run `teacher`: its probabilities on every token (Hinton et al. 2015, arXiv
    1503.02531), and its answers to utterances whose arguments nobody labelled (Kim and Rush 2016, arXiv 1606.07947).

    Both share the teacher's tokenizer. `student` is a run to start from, of the same tokenizer.
    """
    corpus = Corpus.read(data)
    vocabulary = _vocabulary(corpus, folder, teacher, MERGES)
    corpus = msgspec.structs.replace(corpus, labelled=_labels(corpus, folder, teacher, plan.threads))
    if student:
        network = load_network(student / CHECKPOINT, plan.dropout)
    else:
        network = _fresh(_sized(STUDENT, vocabulary, shape), vocabulary, plan)
    recipe = RunConfig(STUDENT, plan, network.shape, grown_from=str(student) if student else None, teacher=str(teacher))
    return _run(recipe, corpus, vocabulary, network, folder, say, load_network(teacher / CHECKPOINT))


def export_run(folder: Path, target: Path) -> None:
    """Write a run's network and tokenizer as an F32 GGUF."""
    name = msgspec.json.decode((folder / PLAN).read_bytes(), type=RunConfig).name
    network = load_network(folder / CHECKPOINT)
    about = GGUFMetadata(f"causeway-{name}", ABOUT[name], refuses=name == STUDENT)
    write_gguf(network, AssistantTokenizer.load(folder / TOKENIZER), target, about)


def importance_of(folder: Path, data: Path, target: Path, count: int, seed: int) -> None:
    """Write the importance matrix of a run's network, from `count` training examples of its own kind."""
    recipe = msgspec.json.decode((folder / PLAN).read_bytes(), type=RunConfig)
    corpus, vocabulary = Corpus.read(data), AssistantTokenizer.load(folder / TOKENIZER)
    examples = Mixture(corpus, vocabulary, recipe.name == STUDENT, seed).epoch()[:count]
    chosen = list(batches(examples, recipe.plan.tokens, random.Random(seed)))
    save_importance(importance(load_network(folder / CHECKPOINT), chosen), target)


def _run(
    recipe: RunConfig,
    corpus: Corpus,
    vocabulary: AssistantTokenizer,
    network: Llama,
    folder: Path,
    say: Callable[[str], None],
    teacher: Llama | None = None,
    meanings: SentenceEmbeddings | None = None,
    hints: FunctionHints | None = None,
) -> Trainer:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    labels = SlotLabels(corpus.arguments())
    trainer = Trainer(network, recipe.plan, folder, device, teacher, meanings, labels.count)
    resumed = trainer.resume()
    (folder / PLAN).write_bytes(msgspec.json.encode(recipe))
    student = recipe.name == STUDENT
    seed, plan = recipe.plan.seed + 1000 * trainer.step, recipe.plan
    mixture = Mixture(
        corpus,
        vocabulary,
        student,
        seed,
        refusals=plan.refusals,
        repeats=plan.repeats,
        share=plan.share,
        meanings=meanings,
        labels=labels,
        hints=hints,
        hinted=plan.hinted,
    )
    validation = validation_examples(corpus, vocabulary, student, per_source=500)
    parameters = sum(weight.numel() for weight in network.parameters())
    state = f"taken up at step {trainer.step}" if resumed else "new"
    say(f"{recipe.name}: {parameters:,} parameters, vocabulary {vocabulary.size}, {state}")

    def report(trainer: Trainer, loss: float) -> None:
        shares = {
            name: right_answers(trainer.average, rows, trainer.device) for name, rows in validation.items() if rows
        }
        entry = {"step": trainer.step, "minutes": trainer.spent_s / 60, "loss": loss, "right": shares}
        with (folder / LOG).open("ab") as log:
            log.write(msgspec.json.encode(entry) + b"\n")
        table = "  ".join(f"{name} {intent:.3f}/{exact:.3f}" for name, (intent, exact) in shares.items())
        say(f"step {trainer.step}  {trainer.spent_s / 60:.1f} min  loss {loss:.4f}  {table}")

    trainer.run(mixture.epoch, report)
    return trainer


def _sized(name: str, vocabulary: AssistantTokenizer, shape: dict[str, int] | None) -> LlamaConfig:
    return LlamaConfig(vocabulary=vocabulary.size, **(shape or shape_for(name, None, 256)))


def _spoken(corpus: Corpus) -> list[str]:
    return [row.text for row in corpus.train]


def _labels(corpus: Corpus, folder: Path, teacher: Path, threads: int) -> tuple[Row, ...]:
    """The teacher's labels, made once and kept in the run's folder."""
    path = folder / LABELS
    if not path.is_file():
        weights = folder / "teacher.gguf"
        export_run(teacher, weights)
        save(label(weights, unlabelled(corpus.train), threads), path)
        weights.unlink()
    return read_rows(path, LABELLED)


def _vocabulary(
    corpus: Corpus, folder: Path, given: Path | None, merges: int, twice: bool = True
) -> AssistantTokenizer:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / TOKENIZER
    if not path.is_file():
        if given:
            made = AssistantTokenizer.load(given / TOKENIZER)
        else:
            made = AssistantTokenizer.train(corpus.texts(), corpus.functions(), corpus.arguments(), merges, twice)
        made.save(path)
    return AssistantTokenizer.load(path)


def _fresh(shape: LlamaConfig, vocabulary: AssistantTokenizer, plan: TrainingPlan) -> Llama:
    torch.manual_seed(plan.seed)
    network = Llama(shape, plan.dropout)
    tie_spaced_twins(network.embedding, vocabulary.tokenizer.get_vocab())
    if can_copy_by_hand(network):
        write_copying(network)
    return network
