"""Commands that train the router signals: convert-bert, train-encoder, train-quality, train-spoken,
train-heard-words. None of them needs torch.
"""

from __future__ import annotations

import random
from pathlib import Path

import click
import msgspec

from causeway_server.models.catalog.artifact import Artifact, DataSource, find_artifact
from causeway_server.models.cli.options import (
    existing_file,
    existing_folder,
    file,
    folder,
    mebibytes,
    threads_option,
    to_option,
)

from ..function_calls.dataset import Row
from ..publish import ATTRIBUTIONS
from ..publish_signal import SignalMetadata, publish_signal
from .options import data_option, limit_option, spread_evenly

MINILM = DataSource(
    "all-MiniLM-L6-v2", "Apache-2.0", "sentence-transformers/all-MiniLM-L6-v2 (Reimers and Gurevych 2019): the teacher"
)
# For the calibrator's card: `evaluate-routing --to` writes routing.md beside it.
ROUTING_LINK = (
    "## Routing",
    "",
    "[routing.md](routing.md) shows how much exact match is retained at each share of requests on the device.",
)
_QUESTION_CHARACTERS = 600  # long questions are cut to this length, as in training

_run = click.option(
    "--run",
    type=folder,
    required=True,
    help="Folder for intermediate results. A second call with this folder continues from these results.",
)


@click.command("convert-bert")
@click.argument("source", metavar="FOLDER", type=existing_folder)
@click.argument("target", metavar="FILE", type=file)
@click.option(
    "--int8",
    is_flag=True,
    help="Quantise the matrices to int8. The file then has a quarter of the size, and the encoder is faster.",
)
def convert_bert(source: Path, target: Path, int8: bool) -> None:
    """Convert the BERT sentence encoder in FOLDER to the ONNX file FILE.

    FOLDER holds model.safetensors, config.json and vocab.txt. FILE is the teacher for `train-encoder`;
    `causeway-models add` takes it in for a device that can afford milliseconds per text.
    """
    from ..signals.bert_to_onnx import convert

    convert(source, target, int8=int8)
    click.echo(f"{target}: {mebibytes(target.stat().st_size)}")


@click.command("train-encoder")
@data_option
@click.option(
    "--teacher",
    type=existing_file,
    required=True,
    help="ONNX file of the teacher, as written by the command `convert-bert`.",
)
@_run
@to_option
@click.option("--epochs", type=click.IntRange(0), default=8, show_default=True, help="Number of passes over the texts.")
@click.option(
    "--dimensions", type=click.IntRange(8), default=256, show_default=True, help="Number of dimensions of a vector."
)
@click.option("--seed", type=int, default=1, show_default=True, help="Seed for random choices.")
def train_encoder(data: Path, teacher: Path, run: Path, to: Path, epochs: int, dimensions: int, seed: int) -> None:
    """Train the device's sentence encoder (a static int8 table) on the vectors of a transformer, the teacher."""
    from causeway_server.models.signals.encoder import SentenceEncoder

    from ..data.corpus import Corpus
    from ..data.open_ended_prompts import open_ended_prompts
    from ..signals.encoder import distill

    corpus, graph = Corpus.read(data), run / "encoder.onnx"
    run.mkdir(parents=True, exist_ok=True)
    questions = [question[:_QUESTION_CHARACTERS] for question in corpus.questions]
    prompts = open_ended_prompts(random.Random(seed), 3000)
    texts = list(dict.fromkeys([*(row.text for row in corpus.train), *questions, *prompts]))
    held = list(dict.fromkeys(row.text for row in corpus.validation))
    metrics = distill(
        SentenceEncoder(teacher),
        texts,
        held,
        run,
        graph,
        epochs=epochs,
        dimensions=dimensions,
        seed=seed,
        progress=click.echo,
    )
    metadata = SignalMetadata(
        kind="embedding",
        architecture=f"static table of word pieces, mean, {dimensions} dimensions",
        quantisation="int8, one scale per row",
        command="causeway-train convert-bert FOLDER FILE; "
        f"train-encoder --teacher FILE --epochs {epochs} --seed {seed}",
        note="This signal maps an English text in lower case to a vector of length 1. The ONNX graph contains the "
        "tokenizer.",
        metrics={
            "cosine/untrained": metrics.before,
            "cosine/trained": metrics.after,
            "cosine": metrics.quantised,
            "rows": metrics.texts,
        },
        seed=seed,
        data=(MINILM, *ATTRIBUTIONS),
    )
    _print_metrics(publish_signal(graph, "encoder", to, metadata))


@click.command("train-quality")
@data_option
@_run
@click.option(
    "--model",
    default="assistant",
    show_default=True,
    help="Published model whose answers are graded as correct or wrong.",
)
@to_option
@click.option(
    "--tokens",
    type=click.IntRange(1, 16),
    default=8,
    show_default=True,
    help="Number of tokens after which the calibration in the report is measured.",
)
@limit_option
@click.option("--seed", type=int, default=6, show_default=True, help="Seed for random choices.")
@threads_option(1)
def train_quality(
    data: Path, run: Path, model: str, to: Path, tokens: int, limit: int | None, seed: int, threads: int
) -> None:
    """Train the estimator of `edge.quality` and the calibrator of confidence on the correct and the wrong answers of a
    model.
    """
    from causeway_server.models.signals.quality import QualityEstimator

    from ..data.corpus import Corpus
    from ..data.open_ended_prompts import open_ended_prompts
    from ..function_calls.intents import is_device_row
    from ..signals.calibration import train_calibrator
    from ..signals.graded_answers import answer_rows, grade, question
    from ..signals.quality import train_quality as train

    judged = find_artifact(model, (to,))
    corpus = Corpus.read(data)
    others = [
        *open_ended_prompts(random.Random(seed), 3000),
        *(text[:_QUESTION_CHARACTERS] for text in corpus.questions),
    ]
    training_rows = spread_evenly([*corpus.train, *map(question, others)], limit)
    held_rows = spread_evenly([*corpus.validation, *(question(text) for text in corpus.held_questions)], limit)

    def in_domain(row: Row) -> bool:
        return is_device_row(row.source, row.intent)

    training, held = (
        grade(rows, answer_rows(judged, rows, run, threads=threads, progress=click.echo), in_domain)
        for rows in (training_rows, held_rows)
    )
    graph, parameters = run / "quality.onnx", run / "calibrator.json"
    quality_metrics = train(training, held, graph, seed=seed, progress=click.echo)
    calibration_metrics = train_calibrator(held, QualityEstimator(graph), parameters, tokens=tokens)
    command = f"causeway-train train-quality --model {model} --tokens {tokens} --seed {seed}"
    metadata = SignalMetadata(
        kind="edge.quality",
        architecture="hashed words, mean, two layers",
        quantisation="int8 table",
        command=command,
        note=f"This signal estimates from the prompt alone the probability that the model {model} answers the prompt "
        "correctly.",
        metrics=quality_metrics.metrics(),
        seed=seed,
        data=ATTRIBUTIONS,
    )
    _print_metrics(publish_signal(graph, "edge-quality", to, metadata, judged=judged))
    metadata = SignalMetadata(
        kind="confidence",
        architecture=f"one logistic regression per number of tokens; the figures are those after {tokens} tokens",
        quantisation="JSON numbers",
        command=command,
        note=f"This signal maps the confidence of the first tokens of an answer by the model {model} to the "
        "probability that the answer is correct.",
        metrics=calibration_metrics.metrics(),
        seed=seed,
        data=ATTRIBUTIONS,
    )
    _print_metrics(publish_signal(parameters, "calibrator", to, metadata, judged=judged, appendix=ROUTING_LINK))


_SPOKEN_NOTE = "The stage for spoken requests is"


@click.command("train-spoken")
@data_option
@_run
@click.option(
    "--model",
    default="assistant",
    show_default=True,
    help="Model that answers the commands. The model must have a calibrator.",
)
@to_option
@click.option(
    "--speech",
    default="speech",
    show_default=True,
    help="Name of the speech model, which `causeway-models pull speech` downloads.",
)
@click.option(
    "--voices",
    default="en-us,en-gb,en-gb-scotland",
    show_default=True,
    help="Voices of espeak-ng that speak the commands, separated by commas.",
)
@click.option(
    "--espeak", default="espeak-ng", show_default=True, help="Command that starts espeak-ng, with its options."
)
@click.option(
    "--below",
    type=click.FloatRange(0.0, 1.0),
    default=0.55,
    show_default=True,
    help="Threshold of the handoff that the command measures. If the confidence of an answer is below this "
    "threshold, the request is handed off.",
)
@click.option(
    "--tokens",
    type=click.IntRange(1, 16),
    default=8,
    show_default=True,
    help="Number of tokens after which the handoff is decided.",
)
@limit_option
@threads_option(1)
def train_spoken(
    data: Path,
    run: Path,
    model: str,
    to: Path,
    speech: str,
    voices: str,
    espeak: str,
    below: float,
    tokens: int,
    limit: int | None,
    threads: int,
) -> None:
    """Train the part of the confidence calibrator that applies to spoken requests. The training uses held-back commands
    that espeak-ng speaks.
    """
    from causeway_server.models.catalog.artifact import find_signal
    from causeway_server.models.signals.calibration import CalibrationParameters, ConfidenceCalibrator

    from ..data.corpus import Corpus
    from ..data.transcripts import spoken_commands, transcribe_rows
    from ..signals.graded_answers import answer_rows
    from ..signals.spoken import fit_spoken, grade_heard, measure_spoken

    judged = find_artifact(model, (to,))
    typed = find_signal("confidence", judged, (to,))
    run.mkdir(parents=True, exist_ok=True)
    transcribed = transcribe_rows(
        spread_evenly(spoken_commands(Corpus.read(data)), limit),
        voices.split(","),
        run / "transcripts.jsonl",
        find_artifact(speech, (to,)).folder,
        espeak=espeak.split(),
        progress=click.echo,
    )
    answers = answer_rows(judged, [one.as_heard for one in transcribed], run, threads=threads, progress=click.echo)
    fitted_on, measured_on = grade_heard(transcribed, answers)
    parameters = msgspec.json.decode(typed.path.read_bytes(), type=CalibrationParameters)
    stage = fit_spoken(fitted_on, ConfidenceCalibrator(parameters), tokens)
    parameters = msgspec.structs.replace(parameters, spoken=stage)
    figures = measure_spoken(measured_on, ConfidenceCalibrator(parameters), tokens, below)
    file = run / "calibrator.json"
    file.write_bytes(msgspec.json.format(msgspec.json.encode(parameters), indent=1))
    command, note = (  # without those of an earlier stage
        typed.manifest.command.partition("; train-spoken")[0],
        typed.manifest.note.partition(f" {_SPOKEN_NOTE}")[0],
    )
    metadata = SignalMetadata(
        kind="confidence",
        architecture=typed.manifest.architecture,
        quantisation=typed.manifest.quantisation,
        command=f"{command}; train-spoken --model {model} --voices {voices} --tokens {tokens}",
        note=f"{note} {_SPOKEN_NOTE} fitted on {len(fitted_on)} held-back commands, spoken by espeak-ng, and measured "
        f"on {len(measured_on)} others.",
        metrics={**typed.manifest.metrics, **figures.metrics()},
        seed=typed.manifest.seed,
        data=ATTRIBUTIONS,
    )
    _print_metrics(publish_signal(file, typed.name, to, metadata, judged=judged, appendix=ROUTING_LINK))


@click.command("train-heard-words")
@data_option
@_run
@to_option
def train_heard_words(data: Path, run: Path, to: Path) -> None:
    """Count the words in the training rows. If a spoken command has several possible transcripts, the device uses these
    counts to choose the likeliest.
    """
    from ..data.corpus import Corpus
    from ..signals.spoken import count_words

    rows = [row for row in Corpus.read(data).train if row.source in ("hwu64", "snips2017")]
    counts = count_words((row.text for row in rows), "en")
    run.mkdir(parents=True, exist_ok=True)
    file = run / "heard-words.json"
    file.write_bytes(msgspec.json.encode(counts))
    metadata = SignalMetadata(
        kind="heard-words",
        architecture="word trigrams, Witten-Bell",
        quantisation="JSON numbers",
        command="causeway-train train-heard-words",
        note=(
            "This signal chooses among ten transcripts of a short English clip, with the probabilities that Whisper "
            f"gives them. The words of {len(rows)} texts were counted."
        ),
        metrics={},
        data=tuple(one for one in ATTRIBUTIONS if one.name in ("HWU64", "SNIPS 2017")),
    )
    _print_metrics(publish_signal(file, "heard-words", to, metadata))


def _print_metrics(artifact: Artifact) -> None:
    figures = ", ".join(f"{key} {value:g}" for key, value in artifact.manifest.metrics.items())
    click.echo(f"{artifact.path}: {figures}")


COMMANDS: tuple[click.Command, ...] = (convert_bert, train_encoder, train_quality, train_spoken, train_heard_words)
