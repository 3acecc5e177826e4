"""The commands that make the learned signals: minilm, encoder, quality, learn-scope. None of them needs torch."""

from __future__ import annotations

import random
from pathlib import Path

import click

from ..catalog.artifact import Artifact, DataSource, find_artifact
from ..function_calls.dataset import Row
from ..publish.publish import ATTRIBUTIONS, SignalMetadata, publish_signal

MINILM = DataSource(
    "all-MiniLM-L6-v2", "Apache-2.0", "sentence-transformers/all-MiniLM-L6-v2 (Reimers and Gurevych 2019): the teacher"
)
_QUESTION_CHARACTERS = 600  # of a long question, as in training

_folder = click.Path(file_okay=False, path_type=Path)
_data = click.option(
    "--data", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True, help="Folder with intents/."
)
_run = click.option("--run", type=_folder, required=True, help="Keeps what takes long; a second call goes on from it.")
_to = click.option("--to", type=_folder, required=True, help="Folder of models.")


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("target", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--int8", is_flag=True, help="Matrices in int8: a quarter of the size, and faster.")
def minilm(folder: Path, target: Path, int8: bool) -> None:
    """Make one ONNX file of a BERT sentence encoder: FOLDER has model.safetensors, config.json and vocab.txt.

    It teaches `encoder`; `causeway-models add` takes it in for a box that can afford it.
    """
    from ..train.signals.bert_to_onnx import convert

    convert(folder, target, int8=int8)
    click.echo(f"{target}: {_mib(target.stat().st_size)}")


@click.command()
@_data
@click.option(
    "--teacher", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True, help="From `minilm`."
)
@_run
@_to
@click.option("--epochs", type=click.IntRange(0), default=8, show_default=True)
@click.option("--dimensions", type=click.IntRange(8), default=256, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
def encoder(data: Path, teacher: Path, run: Path, to: Path, epochs: int, dimensions: int, seed: int) -> None:
    """Distil the device's sentence encoder, a static int8 table, from a transformer."""
    from ..signals.encoder import SentenceEncoder
    from ..train.data.corpus import Corpus
    from ..train.data.open_ended_prompts import chatter
    from ..train.signals.encoder import distill

    corpus, run_file = Corpus.read(data), run / "encoder.onnx"
    run.mkdir(parents=True, exist_ok=True)
    asked = [question[:_QUESTION_CHARACTERS] for question in corpus.questions]
    texts = list(dict.fromkeys([*(row.text for row in corpus.train), *asked, *chatter(random.Random(seed), 3000)]))
    held = list(dict.fromkeys(row.text for row in corpus.validation))
    fit = distill(
        SentenceEncoder(teacher),
        texts,
        held,
        run,
        run_file,
        epochs=epochs,
        dimensions=dimensions,
        seed=seed,
        say=click.echo,
    )
    about = SignalMetadata(
        kind="embedding",
        architecture=f"static table of word pieces, mean, {dimensions} dimensions",
        quantisation="int8, a scale a row",
        command=f"causeway-models minilm FOLDER FILE; encoder --teacher FILE --epochs {epochs} --seed {seed}",
        note="A text as a vector of length 1, in one graph with its tokenizer. English, lower case.",
        metrics={"cosine/untrained": fit.before, "cosine/trained": fit.after, "cosine": fit.rounded, "rows": fit.texts},
        seed=seed,
        data=(MINILM, *ATTRIBUTIONS),
    )
    _told(publish_signal(run_file, "encoder", to, about))


@click.command()
@_data
@_run
@click.option("--model", default="assistant", show_default=True, help="The published model that is judged.")
@_to
@click.option("--tokens", type=click.IntRange(1, 16), default=8, show_default=True, help="Of a handoff, for the card.")
@click.option("--limit", type=click.IntRange(1), help="At most so many prompts of each kind, for a trial.")
@click.option("--seed", type=int, default=6, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True)
def quality(
    data: Path, run: Path, model: str, to: Path, tokens: int, limit: int | None, seed: int, threads: int
) -> None:
    """Learn from a model's own right and wrong answers: edge.quality, and the calibrator of its confidence."""
    from ..function_calls.intents import is_device_row
    from ..signals.quality import QualityEstimator
    from ..train.data.corpus import Corpus
    from ..train.data.open_ended_prompts import chatter
    from ..train.signals.calibration import train_calibrator
    from ..train.signals.graded_answers import answer_rows, judge, question
    from ..train.signals.quality import train_quality

    judged = find_artifact(model, (to,))
    corpus = Corpus.read(data)
    others = [*chatter(random.Random(seed), 3000), *(text[:_QUESTION_CHARACTERS] for text in corpus.questions)]
    learn_rows = _some([*corpus.train, *map(question, others)], limit)
    held_rows = _some([*corpus.validation, *(question(text) for text in corpus.held_questions)], limit)

    def own(row: Row) -> bool:
        return is_device_row(row.source, row.intent)

    learnt, held = (
        judge(rows, answer_rows(judged, rows, run, threads=threads, say=click.echo), own)
        for rows in (learn_rows, held_rows)
    )
    graph, numbers = run / "quality.onnx", run / "calibrator.json"
    fit = train_quality(learnt, held, graph, seed=seed, say=click.echo)
    fits = train_calibrator(held, QualityEstimator(graph), numbers, tokens=tokens)
    command = f"causeway-models quality --model {model} --tokens {tokens} --seed {seed}"
    about = SignalMetadata(
        kind="edge.quality",
        architecture="hashed words, mean, two layers",
        quantisation="int8 table",
        command=command,
        note=f"The probability that {model} answers a prompt rightly, from the prompt alone.",
        metrics=fit.metrics(),
        seed=seed,
    )
    _told(publish_signal(graph, "edge-quality", to, about, judged=judged))
    about = SignalMetadata(
        kind="confidence",
        architecture=f"logistic regressions, one a number of tokens; figures after {tokens}",
        quantisation="plain numbers",
        command=command,
        note=f"The probability that an answer of {model} is right, from the confidence of its first tokens.",
        metrics=fits.metrics(),
        seed=seed,
    )
    # `routing` writes its figures beside the card.
    see = ("## Routing", "", "What the pair keeps, by how much stays on the device: [routing.md](routing.md).")
    _told(publish_signal(numbers, "calibrator", to, about, judged=judged, figures=see))


@click.command("learn-scope")
@_data
@_run
@click.option("--model", default="assistant", show_default=True, help="Whose confidence is joined in.")
@_to
@click.option("--epochs", type=click.IntRange(1), default=15, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True)
def learn_scope(data: Path, run: Path, model: str, to: Path, epochs: int, seed: int, threads: int) -> None:
    """Teach what is out of scope on CLINC150, on the published encoder."""
    from ..signals.encoder import SentenceEncoder
    from ..signals.lookup import find_signal
    from ..train.data.corpus import Corpus
    from ..train.signals.scope import train_scope
    from .measure import asker

    encoder, corpus = find_signal("embedding", None, (to,)), Corpus.read(data)
    rows, held = ([row for row in part if row.source == "clinc150"] for part in (corpus.train, corpus.validation))
    graph = run / "scope.onnx"
    run.mkdir(parents=True, exist_ok=True)
    ask = asker(find_artifact(model, (to,)), run, threads)
    fit = train_scope(rows, held, SentenceEncoder(encoder.path), ask, graph, seed=seed, epochs=epochs, say=click.echo)
    about = SignalMetadata(
        kind="scope",
        architecture="three linear heads (encoder, hashed words, hashed letters), the nearest taught texts, a line",
        quantisation="int8",
        command=f"causeway-models learn-scope --model {model} --epochs {epochs} --seed {seed}",
        note="The probability that none of CLINC150's intents fits a text, from the prompt alone or with the "
        f"confidence of {model} (`causeway-models scope` measures it).",
        metrics=fit.metrics(),
        seed=seed,
        data=(MINILM, *(one for one in ATTRIBUTIONS if one.name == "CLINC150")),
    )
    _told(publish_signal(graph, "encoder-scope", to, about, judged=encoder))


def _some(rows: list[Row], limit: int | None) -> list[Row]:
    """Spread evenly, so that a trial sees every source."""
    if limit is None or len(rows) <= limit:
        return rows
    return [rows[index * len(rows) // limit] for index in range(limit)]


def _told(artifact: Artifact) -> None:
    figures = ", ".join(f"{key} {value:g}" for key, value in artifact.manifest.metrics.items())
    click.echo(f"{artifact.path}: {figures}")


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


COMMANDS: tuple[click.Command, ...] = (minilm, encoder, quality, learn_scope)
