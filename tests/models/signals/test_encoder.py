"""The sentence encoder: word pieces, MiniLM as ONNX compared with a reference, and the distillation."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray

pytest.importorskip("onnxruntime")

from causeway_server.models.catalog.artifact import (
    ArtifactError,
    ArtifactNotFound,
    find_judged_artifact,
    find_signal,
    load_artifact,
    verify_artifact,
)
from causeway_server.models.cli.commands import main
from causeway_server.models.signals.encoder import TOKENS, SentenceEncoder, WordPieces
from causeway_train.cli.commands import main as causeway_train
from causeway_train.onnx_writer import FLOAT, INT64, Node, Port, write_onnx
from causeway_train.signals.bert_to_onnx import convert
from causeway_train.signals.encoder import distill
from tests.models.train.requirements import need_training_packages

PIECES = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "turn",
    "on",
    "off",
    "the",
    "light",
    "##s",
    "radio",
    "play",
    "un",
    "##able",
]
PIECES += [
    "ca",
    "##fe",
    "!",
    "'",
    "it",
    "s",
    "_",
    "日",
    "wake",
    "me",
    "up",
    "at",
    "six",
    "noon",
    "please",
    "who",
    "was",
]
WIDTH, HEADS, LAYERS, POSITIONS = 16, 2, 2, 300
TEXTS = [
    f"{what} {way} the {where}" for what in ("turn", "wake me") for way in ("on", "off", "up") for where in PIECES[8:12]
]

Reals = NDArray[np.float32]


def weights(seed: int = 1) -> dict[str, Reals]:
    """Of a small BERT, random."""
    draw = np.random.default_rng(seed)

    def some(*shape: int) -> Reals:
        return (draw.standard_normal(shape) * 0.4).astype(np.float32)

    tensors = {
        "embeddings.word_embeddings.weight": some(len(PIECES), WIDTH),
        "embeddings.position_embeddings.weight": some(POSITIONS, WIDTH),
        "embeddings.token_type_embeddings.weight": some(2, WIDTH),
    }
    norms = ["embeddings"]
    for layer in range(LAYERS):
        at = f"encoder.layer.{layer}."
        sizes = {f"{at}attention.self.{part}": (WIDTH, WIDTH) for part in ("query", "key", "value")}
        sizes |= {f"{at}attention.output.dense": (WIDTH, WIDTH), f"{at}intermediate.dense": (4 * WIDTH, WIDTH)}
        sizes |= {f"{at}output.dense": (WIDTH, 4 * WIDTH)}
        for name, size in sizes.items():
            tensors |= {f"{name}.weight": some(*size), f"{name}.bias": some(size[0])}
        norms += [f"{at}attention.output", f"{at}output"]
    for name in norms:
        tensors |= {f"{name}.LayerNorm.weight": 1 + some(WIDTH), f"{name}.LayerNorm.bias": some(WIDTH)}
    return tensors


def save(folder: Path, tensors: dict[str, Reals]) -> None:
    """As a published sentence encoder: safetensors, sizes, word pieces."""
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, value in tensors.items():
        offsets = [len(data), len(data) + value.nbytes]
        header[name] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": offsets}  # type: ignore[dict-item]
        data += value.tobytes()
    encoded = json.dumps(header).encode()
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)
    sizes = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS, "model_type": "bert"}
    (folder / "config.json").write_text(json.dumps(sizes))
    (folder / "vocab.txt").write_text("\n".join(PIECES) + "\n", encoding="utf-8")


def reference(of: dict[str, Reals], ids: list[int]) -> Reals:
    """BERT (Devlin et al. 2018) written down once more, plainly; the mean of its last layer, of length 1."""

    def norm(x: Reals, name: str) -> Reals:
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-12)
        return x * of[f"{name}.LayerNorm.weight"] + of[f"{name}.LayerNorm.bias"]

    def linear(x: Reals, name: str) -> Reals:
        return x @ of[f"{name}.weight"].T + of[f"{name}.bias"]

    x = of["embeddings.word_embeddings.weight"][ids] + of["embeddings.position_embeddings.weight"][: len(ids)]
    x = norm(x + of["embeddings.token_type_embeddings.weight"][0], "embeddings")
    erf = np.vectorize(math.erf)
    for layer in range(LAYERS):
        at = f"encoder.layer.{layer}."
        parts = [linear(x, f"{at}attention.self.{part}") for part in ("query", "key", "value")]
        query, key, value = (np.split(part, HEADS, axis=1) for part in parts)
        seen = []
        for q, k, v in zip(query, key, value, strict=True):
            odds = np.exp(q @ k.T / np.sqrt(WIDTH // HEADS))
            seen.append(odds / odds.sum(-1, keepdims=True) @ v)
        x = norm(x + linear(np.concatenate(seen, axis=1), f"{at}attention.output.dense"), f"{at}attention.output")
        hidden = linear(x, f"{at}intermediate.dense")
        x = norm(x + linear(hidden * (1 + erf(hidden / math.sqrt(2))) / 2, f"{at}output.dense"), f"{at}output")
    mean = x.mean(axis=0)
    return (mean / np.linalg.norm(mean)).astype(np.float32)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    save(folder, weights())
    return folder


def test_words_are_split_as_bert_splits_them() -> None:
    pieces = WordPieces(PIECES)

    def cut(text: str) -> list[str]:
        return [PIECES[number] for number in pieces(text)]

    assert cut("Turn ON the lights!") == ["turn", "on", "the", "light", "##s", "!"]
    assert cut("it's  un\tunable") == ["it", "'", "s", "un", "un", "##able"]
    assert cut("café CAFÉ cafe") == ["ca", "##fe"] * 3
    assert cut("turn_on 日日") == ["turn", "_", "on", "日", "日"]
    assert cut("lightx " + "light" * 30) == ["[UNK]", "[UNK]"]
    assert cut(" \n") == []
    with pytest.raises(ArtifactError, match="UNK"):
        WordPieces(["a", "b"])


@pytest.mark.parametrize(("int8", "close"), [(False, 0.9999), (True, 0.98)])
def test_the_onnx_graph_agrees_with_the_reference(published: Path, tmp_path: Path, int8: bool, close: float) -> None:
    """In int8 nearly; the graph adds the start and end tokens itself."""
    target = tmp_path / "bert.onnx"
    convert(published, target, int8=int8)
    encoder = SentenceEncoder(target)
    for text in ("turn on the lights", "play", "", "wake me up at six please", "the " * 400):
        ids = encoder.pieces(text)[: TOKENS - 2]
        wanted = reference(weights(), [PIECES.index("[CLS]"), *ids, PIECES.index("[SEP]")])
        found = encoder(text)
        assert found.shape == (WIDTH,)
        assert float(found @ found) == pytest.approx(1.0, abs=1e-4)
        assert float(found @ wanted) > close, text


def test_a_table_learns_from_its_teacher(published: Path, tmp_path: Path) -> None:
    """On held-out texts; a second run does not call the teacher."""
    convert(published, tmp_path / "bert.onnx")
    output: list[str] = []
    teacher = SentenceEncoder(tmp_path / "bert.onnx")
    run, target = tmp_path / "run", tmp_path / "table.onnx"
    held = ["turn the radio off please", "who was up at noon", "play it on the light"]

    def run_distillation() -> tuple[float, float, float]:
        fit = distill(teacher, TEXTS, held, run, target, epochs=60, rate=0.02, dimensions=8, progress=output.append)
        return fit.before, fit.after, fit.quantised

    before, after, rounded = run_distillation()
    assert after > before
    assert rounded == pytest.approx(after, abs=0.02)
    assert any("the teacher has read" in line for line in output)
    output.clear()
    assert run_distillation() == (before, after, rounded)
    assert not any("the teacher has read" in line for line in output)
    table = SentenceEncoder(target)
    assert table.pieces.listed == tuple(PIECES)
    assert table("turn on the lights").shape == (8,)
    assert float(table("turn on the lights") @ table("lights the on turn")) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.slow
def test_an_encoder_is_made_by_two_commands(published: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "intents").mkdir(parents=True)
    lines = [json.dumps({"text": text, "intent": "x"}) for text in TEXTS]
    (data / "intents" / "hwu64.jsonl").write_text("\n".join(lines))
    folders = ("--data", data, "--run", tmp_path / "run", "--to", tmp_path / "m")
    commands = (
        ("convert-bert", published, tmp_path / "t.onnx", "--int8"),
        ("train-encoder", "--teacher", tmp_path / "t.onnx", *folders, "--epochs", 1, "--dimensions", 8),
    )
    for command in commands:
        result = CliRunner().invoke(causeway_train, [str(word) for word in command], catch_exceptions=False)
        assert result.exit_code == 0, result.output
    artifact = load_artifact(tmp_path / "m" / "encoder")
    verify_artifact(artifact)
    assert find_signal("embedding", None, (tmp_path / "m",)) == artifact
    assert "all-MiniLM-L6-v2" in (artifact.folder / "README.md").read_text()


def test_an_added_transformer_precedes_the_shipped_table(published: Path, tmp_path: Path) -> None:
    """The shipped judge of the semantic cache keeps its own encoder."""
    convert(published, tmp_path / "large-encoder.onnx", int8=True)
    command = ["add", str(tmp_path / "large-encoder.onnx"), "--to", str(tmp_path / "mine")]
    result = CliRunner().invoke(main, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found = find_signal("embedding", None, (tmp_path / "mine",))
    assert found.name == "large-encoder"
    assert SentenceEncoder(found.path)("turn on the lights").shape == (WIDTH,)
    assert find_judged_artifact(find_signal("same-answer"), (tmp_path / "mine",)) == find_signal("embedding")
    with pytest.raises(ArtifactNotFound, match="not on this machine"):
        find_judged_artifact(found, (tmp_path / "mine",))


def test_other_files_are_refused(published: Path, tmp_path: Path) -> None:
    """Another graph, a folder without a model, and weights that lack a layer."""
    other = tmp_path / "other.onnx"
    ports = [Port("x", FLOAT, [1])], [Port("y", FLOAT, [1])]
    write_onnx(other, "other", [Node("Neg", ["x"], ["y"])], inputs=ports[0], outputs=ports[1], constants={})
    with pytest.raises(ArtifactError, match="not a sentence encoder"):
        SentenceEncoder(other)
    with pytest.raises(ArtifactError, match="not a BERT"):
        convert(tmp_path, tmp_path / "never.onnx")
    save(tmp_path / "half", {k: v for k, v in weights().items() if "layer.1" not in k})
    with pytest.raises(ArtifactError, match="not a BERT"):
        convert(tmp_path / "half", tmp_path / "never.onnx")
    assert not (tmp_path / "never.onnx").exists()


@pytest.mark.slow  # `make quick` sets up no training packages
def test_our_graphs_pass_the_onnx_checker(published: Path, tmp_path: Path) -> None:
    need_training_packages()
    import onnx

    ports = [Port("x", INT64, ["n", 2])], [Port("y", INT64, [1, 2])]
    node = Node("ReduceSum", ["x", "axes"], ["y"], {"keepdims": 1, "noop_with_empty_axes": 0})
    path = tmp_path / "sum.onnx"
    write_onnx(path, "sum", [node], inputs=ports[0], outputs=ports[1], constants={"axes": np.array([0], np.int64)})
    onnx.checker.check_model(str(path), full_check=True)
    convert(published, tmp_path / "bert.onnx", int8=True)
    onnx.checker.check_model(str(tmp_path / "bert.onnx"), full_check=True)


def test_the_shipped_encoder_ranks_a_paraphrase_first() -> None:
    shipped = find_signal("embedding")
    verify_artifact(shipped)
    assert shipped.manifest.size_bytes < 10 * 2**20
    encoder = SentenceEncoder(shipped.path)
    near = encoder("switch off the lamp in the kitchen") @ encoder("turn the kitchen light off")
    far = encoder("switch off the lamp in the kitchen") @ encoder("how much money is on my bank account")
    assert near > 0.6 > 0.3 > far
    assert encoder("").shape == encoder("日本語 " * 5000).shape == (256,)
