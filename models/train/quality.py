"""Train `edge.quality` on what the device's model gets right and wrong, and write it as one ONNX graph."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn
from torch.nn import functional

from ..answer import expected
from ..catalog import on_device
from ..dataset import Row
from ..evaluate import auroc
from ..quality import BUCKETS, features
from .chatter import chatter
from .mixture import Corpus, Example
from .network import Llama
from .run import TOKENIZER
from .trainer import CHECKPOINT, answer_logits, autocast, batches, load_network
from .vocabulary import Vocabulary

WIDTH, HIDDEN, EPOCHS, BATCH = 32, 16, 4, 256


class Judged(msgspec.Struct, frozen=True):
    """A prompt, and whether the device's model answered it rightly."""

    text: str
    right: bool


class Fit(msgspec.Struct, frozen=True):
    """Figures on held-back prompts that neither training nor calibration saw."""

    auroc: float
    ece: float  # expected calibration error, ten equal bins
    right: float  # share of prompts answered rightly
    rows: int


class Estimator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(BUCKETS, WIDTH, mode="mean")
        self.first, self.second = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, 1)
        nn.init.normal_(self.table.weight, std=0.1)

    def forward(self, texts: Sequence[str]) -> Tensor:
        """Log odds [texts] of a right answer."""
        bags = [torch.from_numpy(features(text)) for text in texts]
        starts = torch.tensor([0, *(len(bag) for bag in bags[:-1])]).cumsum(0)
        means = functional.dropout(self.table(torch.cat(bags), starts), 0.1, self.training)
        odds: Tensor = self.second(torch.relu(self.first(means)))[:, 0]
        return odds


def judge(network: Llama, vocabulary: Vocabulary, rows: Sequence[Row]) -> list[Judged]:
    """Greedy answers of `network`, right or wrong; every row outside the device's domain counts as wrong."""
    own = [row for row in rows if on_device(row.source, row.intent)]
    prompts = vocabulary.texts([row.text for row in own])
    examples = [
        Example(vocabulary.prompt(ids), vocabulary.call(expected(row)), row.text)
        for row, ids in zip(own, prompts, strict=True)
    ]
    judged = [Judged(row.text, False) for row in rows if not on_device(row.source, row.intent)]
    network.eval()
    for batch in batches(examples, 8192, random.Random(0)):
        with torch.no_grad(), autocast("cpu"):
            logits, wanted = answer_logits(network, batch)
        right: Tensor = logits.argmax(-1) == wanted
        parts = torch.split(right, [len(one.target) for one in batch])  # type: ignore[no-untyped-call]
        judged += [Judged(one.source, bool(part.all())) for one, part in zip(batch, parts, strict=True)]
    return judged


def train_quality(data: Path, run: Path, target: Path, *, seed: int, threads: int, say: Callable[[str], None]) -> Fit:
    """Train on the answers of the network in the folder `run`."""
    torch.set_num_threads(threads)
    network, vocabulary = load_network(run / CHECKPOINT), Vocabulary.load(run / TOKENIZER)
    return fit_quality(network, vocabulary, Corpus.read(data), target, seed=seed, say=say)


def fit_quality(
    network: Llama, vocabulary: Vocabulary, corpus: Corpus, target: Path, *, seed: int, say: Callable[[str], None]
) -> Fit:
    """Judge training rows to learn from, and held-back rows to calibrate and measure on."""
    others = [Judged(text, False) for text in [*chatter(random.Random(seed), 3000), *corpus.questions]]
    learnt = judge(network, vocabulary, corpus.train) + others
    held = judge(network, vocabulary, corpus.validation) + [Judged(text, False) for text in corpus.held_questions]
    return train_on(learnt, held, target, seed=seed, say=say)


def train_on(
    learnt: Sequence[Judged], held: Sequence[Judged], target: Path, *, seed: int, say: Callable[[str], None]
) -> Fit:
    """Train on `learnt`, calibrate on one half of `held`, measure on the other; write the graph to `target`."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    shuffled = draw.sample(list(held), len(held))
    estimator = Estimator()
    _learn(estimator, learnt, draw, say)
    half = len(shuffled) // 2
    _calibrate(estimator, shuffled[:half])
    write_onnx(estimator, target)
    told = _probabilities(estimator, shuffled[half:])
    truth = np.array([one.right for one in shuffled[half:]])
    area = auroc(told[~truth].tolist(), told[truth].tolist())
    return Fit(auroc=area or 0.0, ece=calibration_error(told, truth), right=float(truth.mean()), rows=len(truth))


def calibration_error(told: NDArray[np.float64], truth: NDArray[np.bool_], bins: int = 10) -> float:
    """Mean distance between what was promised and what held, over equal bins, weighted by their size."""
    places = np.minimum((told * bins).astype(int), bins - 1)
    gaps = [abs(told[places == b].mean() - truth[places == b].mean()) * (places == b).mean() for b in set(places)]
    return float(sum(gaps))


def write_onnx(estimator: Estimator, path: Path) -> None:
    """features int64 [n] → probability float32 [1]; the table in int8 with one scale."""
    table = estimator.table.weight.detach().numpy()
    scale = np.float32(np.abs(table).max() / 127)
    constants: dict[str, NDArray[np.generic]] = {
        "table": np.round(table / scale).astype(np.int8),
        "scale": scale.reshape(1),
        "w1": estimator.first.weight.detach().numpy().T.copy(),
        "b1": estimator.first.bias.detach().numpy(),
        "w2": estimator.second.weight.detach().numpy().T.copy(),
        "b2": estimator.second.bias.detach().numpy(),
        "axis": np.array([0], dtype=np.int64),
    }
    nodes = [
        helper.make_node("Gather", ["table", "features"], ["rows"]),
        helper.make_node("Cast", ["rows"], ["reals"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["reals", "axis"], ["steps"], keepdims=0),
        helper.make_node("Mul", ["steps", "scale"], ["mean"]),
        helper.make_node("MatMul", ["mean", "w1"], ["h0"]),
        helper.make_node("Add", ["h0", "b1"], ["h1"]),
        helper.make_node("Relu", ["h1"], ["h2"]),
        helper.make_node("MatMul", ["h2", "w2"], ["z0"]),
        helper.make_node("Add", ["z0", "b2"], ["z1"]),
        helper.make_node("Sigmoid", ["z1"], ["probability"]),
    ]
    graph = helper.make_graph(
        nodes,
        "edge_quality",
        [helper.make_tensor_value_info("features", TensorProto.INT64, ["n"])],
        [helper.make_tensor_value_info("probability", TensorProto.FLOAT, [1])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], producer_name="causeway-models")
    model.ir_version = 9
    onnx.checker.check_model(model)
    onnx.save(model, str(path))


def _learn(estimator: Estimator, judged: Sequence[Judged], draw: random.Random, say: Callable[[str], None]) -> None:
    optimizer = torch.optim.AdamW(estimator.parameters(), lr=3e-3, weight_decay=1e-2)
    rows = list(judged)
    for epoch in range(EPOCHS):
        draw.shuffle(rows)
        losses = []
        estimator.train()
        for start in range(0, len(rows), BATCH):
            part = rows[start : start + BATCH]
            truth = torch.tensor([float(one.right) for one in part])
            loss = functional.binary_cross_entropy_with_logits(estimator([one.text for one in part]), truth)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(float(loss.detach()))
        say(f"edge.quality: epoch {epoch + 1} of {EPOCHS}, loss {np.mean(losses):.3f}")


def _calibrate(estimator: Estimator, judged: Sequence[Judged]) -> None:
    """Platt scaling (1999): a slope and an offset on the log odds, folded into the last layer."""
    estimator.eval()
    with torch.no_grad():
        odds = torch.cat(
            [estimator([one.text for one in judged[at : at + 1024]]) for at in range(0, len(judged), 1024)]
        )
    truth = torch.tensor([float(one.right) for one in judged])
    slope, offset = torch.ones((), requires_grad=True), torch.zeros((), requires_grad=True)
    optimizer = torch.optim.LBFGS([slope, offset], max_iter=100)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = functional.binary_cross_entropy_with_logits(slope * odds + offset, truth)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        estimator.second.weight.mul_(slope)
        estimator.second.bias.mul_(slope).add_(offset)


def _probabilities(estimator: Estimator, judged: Sequence[Judged]) -> NDArray[np.float64]:
    estimator.eval()
    with torch.no_grad():
        odds = [estimator([one.text for one in judged[at : at + 1024]]) for at in range(0, len(judged), 1024)]
    told: NDArray[np.float64] = torch.cat(odds).sigmoid().double().numpy()
    return told
