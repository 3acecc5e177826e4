"""Train one of the two assistants from the data folder into a run folder: tokenizer, checkpoint, log."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from .mixture import Corpus, Mixture, validation_examples
from .network import Llama, Shape, grown
from .trainer import Plan, Trainer, load_network, right_answers
from .vocabulary import Vocabulary

TOKENIZER, PLAN, LOG = "tokenizer.json", "plan.json", "log.jsonl"
MERGES = 1700
SHAPES = {"assistant": {"layers": 4}, "assistant-large": {"layers": 12}}


def train(
    name: str,
    data: Path,
    folder: Path,
    plan: Plan,
    *,
    shape: dict[str, int] | None = None,
    start: Path | None = None,
    tokenizer: Path | None = None,
    say: Callable[[str], None] = print,
) -> Trainer:
    """Train `name` (assistant: the device's, with refusals; assistant-large: the whole catalogue), or take a run up again.

    `start` is a checkpoint of the same width to grow from; its tokenizer must be given too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    corpus = Corpus.read(data)
    vocabulary = _vocabulary(corpus, folder, tokenizer)
    sizes = Shape(vocabulary=vocabulary.size, **(shape or SHAPES[name]))
    network = grown(load_network(start), sizes, plan.dropout) if start else _fresh(sizes, vocabulary, plan)
    trainer = Trainer(network, plan, folder, "cuda" if torch.cuda.is_available() else "cpu")
    (folder / PLAN).write_bytes(msgspec.json.encode({"name": name, "plan": plan, "shape": sizes}))
    resumed = trainer.resume()
    student = name == "assistant"
    mixture = Mixture(corpus, vocabulary, student, plan.seed + 1000 * trainer.step)
    validation = validation_examples(corpus, vocabulary, student, per_source=500)
    parameters = sum(weight.numel() for weight in network.parameters())
    say(f"{name}: {parameters:,} parameters, vocabulary {vocabulary.size}, resumed {resumed} at step {trainer.step}")

    def report(trainer: Trainer, loss: float) -> None:
        shares = {name: right_answers(trainer.network, rows, trainer.device) for name, rows in validation.items()}
        entry = {"step": trainer.step, "minutes": trainer.spent_s / 60, "loss": loss, "right": shares}
        with (folder / LOG).open("ab") as log:
            log.write(msgspec.json.encode(entry) + b"\n")
        table = "  ".join(f"{name} {intent:.3f}/{exact:.3f}" for name, (intent, exact) in shares.items())
        say(f"step {trainer.step} {trainer.spent_s / 60:.1f} min  loss {loss:.4f}  {table}")

    trainer.run(mixture.epoch, report)
    return trainer


def _vocabulary(corpus: Corpus, folder: Path, given: Path | None) -> Vocabulary:
    path = folder / TOKENIZER
    if not path.is_file():
        made = Vocabulary.load(given) if given else None
        made = made or Vocabulary.train(corpus.texts(), corpus.functions(), corpus.arguments(), MERGES)
        made.save(path)
    return Vocabulary.load(path)


def _fresh(shape: Shape, vocabulary: Vocabulary, plan: Plan) -> Llama:
    """Start a word with and without its leading space at the same place: copying into JSON crosses that border."""
    torch.manual_seed(plan.seed)
    network = Llama(shape, plan.dropout)
    ids = vocabulary.tokenizer.get_vocab()
    with torch.no_grad():
        for piece, token in ids.items():
            bare = ids.get(piece[1:]) if piece.startswith("Ġ") else None
            if bare is not None:
                network.embedding.weight[token] = 0.95 * network.embedding.weight[bare] + 0.3 * network.embedding.weight[token]
    return network
