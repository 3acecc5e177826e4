"""Teach what is out of scope: three linear heads over the intents, the nearest taught text, and a line over all.

The line has to see how the heads fare on texts that they were not taught. So a part of the rows is kept from a first
pair of heads, the line is fitted on these rows and on the texts that are known to be out of scope, and then the heads
are taught again on everything. A model's confidence is another matter: it has seen all of these rows. So the line that
joins it in is fitted on half of the held-back rows, and measured on the other half. Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from router.types import Confidence

from ..calibrator import Line, log_odds
from ..dataset import Row, held_back
from ..encoder import Encoder, Vector
from ..evaluate import auroc
from ..onnx_file import FLOAT, INT64, Constant, Node, Port, write_onnx
from ..scope import ALONE, BUCKETS, JOINED, Scope, joined_inputs, letters, words
from .adam import Adam, Reals
from .logistic import fit_line
from .quality import HALVES

EPOCHS, BATCH, RATE, DECAY, DROPOUT = 15, 256, 0.03, 1e-2, 0.3
STRETCH = 8.0  # vectors of length 1 are short for a head that is to be decided
KEPT = 0.2  # of the rows, for the line
_LINE = "line"

Bags = Sequence[NDArray[np.int64]]
Ask = Callable[[Sequence[str]], Sequence[Confidence]]  # texts → how sure a model was of its answers


class Fit(msgspec.Struct, frozen=True):
    """On held-back rows: area under the ROC curve, out of scope against in scope; share of right intents in scope."""

    auroc: float
    half_auroc: float  # the same on the half that the next one is measured on
    joined_auroc: float  # with a model's confidence
    intent: float
    rows: int
    outside: int  # of the rows

    def metrics(self) -> dict[str, float]:
        figures: dict[str, float] = msgspec.structs.asdict(self)
        return figures


class Views(msgspec.Struct, frozen=True):
    """Texts as the heads see them."""

    vectors: Vector
    bags: tuple[Bags, Bags]  # words, letters

    @classmethod
    def of(cls, encoder: Encoder, texts: Sequence[str]) -> Views:
        return cls(encoder.all(texts), ([words(text) for text in texts], [letters(text) for text in texts]))

    def __len__(self) -> int:
        return len(self.vectors)

    def part(self, kept: NDArray[np.bool_]) -> Views:
        first, second = ([bag for bag, k in zip(bags, kept, strict=True) if k] for bags in self.bags)
        return Views(self.vectors[kept], (first, second))


class Heads:
    """Linear heads over the intents: one on the encoder's vectors, one on hashed words, one on hashed letters."""

    def __init__(self, views: Views, intents: NDArray[np.int64], seed: int, epochs: int) -> None:
        kinds, draw = int(intents.max()) + 1, np.random.default_rng(seed)
        self.kinds = kinds
        self._dense = Adam(np.zeros((views.vectors.shape[1], kinds), np.float32), decay=DECAY)
        self._sparse = [Adam(np.zeros((BUCKETS, kinds), np.float32), decay=DECAY) for _ in views.bags]
        self._biases = [Adam(np.zeros(kinds, np.float32)) for _ in range(1 + len(views.bags))]
        for epoch in range(epochs):
            rate = RATE * (1 - epoch / epochs)
            for at in np.array_split(draw.permutation(len(intents)), -(-len(intents) // BATCH)):
                part: Reals = views.vectors[at] * np.float32(STRETCH)
                push = _push(part @ self._dense.value + self._biases[0].value, intents[at])
                self._dense.step(part.T @ push, rate)
                self._biases[0].step(push.sum(axis=0), rate)
                for table, bias, bags in zip(self._sparse, self._biases[1:], views.bags, strict=True):
                    touched, shares = _shares([_thinned(bags[i], draw) for i in at])
                    push = _push(shares @ table.value[touched] + bias.value, intents[at])
                    table.step(shares.T @ push, rate, touched)
                    bias.step(push.sum(axis=0), rate)

    def odds(self, views: Views) -> Reals:
        """Mean of the heads' probabilities: float32 [texts, intents]."""
        mean = _softmax(views.vectors @ self.dense + self._biases[0].value)
        for table, bias, bags in zip(self._sparse, self._biases[1:], views.bags, strict=True):
            sums = [table.value[bag].sum(axis=0) / np.float32(max(1, len(bag)) ** 0.5) for bag in bags]
            mean += _softmax(np.stack(sums) + bias.value)
        return mean / np.float32(1 + len(self._sparse))

    @property
    def dense(self) -> Reals:
        return self._dense.value * np.float32(STRETCH)

    @property
    def sparse(self) -> tuple[Reals, ...]:
        return tuple(table.value for table in self._sparse)

    @property
    def biases(self) -> tuple[Reals, ...]:
        return tuple(bias.value for bias in self._biases)


def train_scope(
    rows: Sequence[Row],
    held: Sequence[Row],
    encoder: Encoder,
    ask: Ask,
    target: Path,
    *,
    seed: int = 1,
    epochs: int = EPOCHS,
    say: Callable[[str], None] = lambda _: None,
) -> Fit:
    """Teach on `rows` (intent `oos`: out of scope), measure on `held`, write the graph to `target`."""
    taught = [row for row in rows if row.intent != "oos"]
    names = {name: number for number, name in enumerate(sorted({row.intent for row in taught}))}
    intents = np.array([names[row.intent] for row in taught])
    views = Views.of(encoder, [row.text for row in taught])
    kept = np.array([held_back(row.text, _LINE, KEPT) for row in taught])
    first, known = Heads(views.part(~kept), intents[~kept], seed, epochs), views.part(~kept).vectors
    say("scope: the heads that the line is fitted on are taught")
    outside = [row.text for row in rows if row.intent == "oos"]
    truth = np.array([False] * int(kept.sum()) + [True] * len(outside))
    seen = np.concatenate([told(first, known, part) for part in (views.part(kept), Views.of(encoder, outside))])
    weights = np.where(truth, 0.5 / truth.mean(), 0.5 / (1 - truth.mean()))
    lines = {ALONE: fit_line(seen, truth, weights)}
    heads = Heads(views, intents, seed, epochs)
    say("scope: the heads are taught again, on everything")
    write_scope(heads, views.vectors, {**lines, JOINED: lines[ALONE]}, target)
    lines[JOINED] = _joined(Scope(target, encoder), held, ask)
    write_scope(heads, views.vectors, lines, target)
    scope = Scope(target, encoder)
    right = [scope.intent(row.text) == names.get(row.intent) for row in held if row.intent != "oos"]
    fit = measure(scope, held, ask)
    return msgspec.structs.replace(fit, intent=float(np.mean(right)) if right else 0.0)


def measure(scope: Scope, rows: Sequence[Row], ask: Ask) -> Fit:
    """`intent` is left at 0: a file does not say in which order the heads know the intents."""
    half = [row for row in rows if not held_back(row.text, HALVES, 0.5)]
    return Fit(
        auroc=_area([scope(row.text) for row in rows], rows),
        half_auroc=_area([scope(row.text) for row in half], half),
        joined_auroc=_area(
            [scope(row.text, one) for row, one in zip(half, ask([row.text for row in half]), strict=True)], half
        ),
        intent=0.0,
        rows=len(rows),
        outside=sum(row.intent == "oos" for row in rows),
    )


def _area(told: Sequence[float], rows: Sequence[Row]) -> float:
    """0 where one side is empty."""
    outside = np.array([row.intent == "oos" for row in rows], bool)
    values = np.array(told)
    return auroc(values[~outside].tolist(), values[outside].tolist()) or 0.0


def _joined(scope: Scope, held: Sequence[Row], ask: Ask) -> Line:
    """A line over what is known from the prompt and what a model's first tokens say."""
    half = [row for row in held if held_back(row.text, HALVES, 0.5)]
    sure = ask([row.text for row in half])
    seen = np.array([(log_odds(scope(row.text)), *joined_inputs(one)) for row, one in zip(half, sure, strict=True)])
    truth = np.array([row.intent == "oos" for row in half])
    weights = np.where(truth, 0.5 / max(truth.mean(), 1e-9), 0.5 / max(1 - truth.mean(), 1e-9))
    return fit_line(seen, truth, weights)


def told(heads: Heads, taught: Vector, views: Views) -> NDArray[np.float64]:
    """float64 [texts, 2]: how undecided the heads are, and how far the nearest taught text is."""
    odds = heads.odds(views)
    undecided = -(odds * np.log(odds + 1e-9)).sum(axis=1)
    parts = np.array_split(views.vectors, -(-len(views) // 512))
    far = 1 - np.concatenate([(part @ taught.T).max(axis=1) for part in parts])
    return np.stack([undecided, far], axis=1).astype(np.float64)


def write_scope(heads: Heads, taught: Vector, lines: dict[str, Line], target: Path) -> None:
    """embedding float32 [dimensions], words and letters int64 [n] → told float32 [2], odds float32 [intents]."""
    dense, dense_scale = _levels(heads.dense.T)
    texts, texts_scale = _levels(taught)
    constants: dict[str, Constant] = {
        "texts": texts.T.copy(),
        "texts_scale": texts_scale,
        "dense": dense.T.copy(),
        "dense_scale": dense_scale,
        "dense_bias": heads.biases[0],
        "row": np.array([1, -1], np.int64),
        "flat": np.array([-1], np.int64),
        "third": np.array(1 / 3, np.float32),
        "one": np.array([1.0], np.float32),
        "least": np.array(1e-9, np.float32),
    }
    for view, table, bias in zip(("words", "letters"), heads.sparse, heads.biases[1:], strict=True):
        levels, scale = _levels(table)
        constants |= {f"{view}_table": levels, f"{view}_scale": scale, f"{view}_bias": bias}
    nodes = [
        Node("Reshape", ["embedding", "row"], ["wide"]),
        Node("DynamicQuantizeLinear", ["wide"], ["levels", "step", "zero"]),
        *_product("texts", "nearness"),
        Node("ReduceMax", ["nearness"], ["near"], {"keepdims": 0}),
        Node("Reshape", ["near", "flat"], ["near1"]),
        Node("Sub", ["one", "near1"], ["far"]),
        *_product("dense", "dense_sum"),
        Node("Add", ["dense_sum", "dense_bias"], ["dense_odds"]),
        Node("Softmax", ["dense_odds"], ["dense_share"], {"axis": -1}),
        *_bag("words"),
        *_bag("letters"),
        Node("Sum", ["dense_share", "words_share", "letters_share"], ["all"]),
        Node("Mul", ["all", "third"], ["mean"]),
        Node("Reshape", ["mean", "flat"], ["odds"]),
        Node("Add", ["odds", "least"], ["odds1"]),
        Node("Log", ["odds1"], ["logs"]),
        Node("Mul", ["odds", "logs"], ["parts"]),
        Node("ReduceSum", ["parts"], ["order"], {"keepdims": 1}),
        Node("Neg", ["order"], ["undecided"]),
        Node("Concat", ["undecided", "far"], ["told"], {"axis": 0}),
    ]
    write_onnx(
        target,
        "scope",
        nodes,
        takes=[Port("embedding", FLOAT, [taught.shape[1]]), Port("words", INT64, ["n"]), Port("letters", INT64, ["m"])],
        gives=[Port("told", FLOAT, [2]), Port("odds", FLOAT, [heads.kinds])],
        constants=constants,
        metadata={key: msgspec.json.encode(line).decode() for key, line in lines.items()},
    )


def _bag(view: str) -> list[Node]:
    """The probabilities of a head on hashed features: the sum of their rows over the root of their number."""
    return [
        Node("Gather", [f"{view}_table", view], [f"{view}_rows"]),
        Node("Cast", [f"{view}_rows"], [f"{view}_reals"], {"to": FLOAT}),
        Node("Gather", [f"{view}_scale", view], [f"{view}_scales"]),
        Node("Reshape", [f"{view}_scales", "row"], [f"{view}_scales1"]),
        Node("MatMul", [f"{view}_scales1", f"{view}_reals"], [f"{view}_sum"]),
        Node("Shape", [view], [f"{view}_size"]),
        Node("Cast", [f"{view}_size"], [f"{view}_count"], {"to": FLOAT}),
        Node("Max", [f"{view}_count", "one"], [f"{view}_count1"]),
        Node("Sqrt", [f"{view}_count1"], [f"{view}_length"]),
        Node("Div", [f"{view}_sum", f"{view}_length"], [f"{view}_mean"]),
        Node("Add", [f"{view}_mean", f"{view}_bias"], [f"{view}_odds"]),
        Node("Softmax", [f"{view}_odds"], [f"{view}_share"], {"axis": -1}),
    ]


def _product(name: str, gives: str) -> list[Node]:
    """The quantised embedding by the int8 matrix `name`, whose columns have a scale each."""
    return [
        Node("MatMulInteger", ["levels", name, "zero"], [f"{name}_whole"]),
        Node("Cast", [f"{name}_whole"], [f"{name}_real"], {"to": FLOAT}),
        Node("Mul", ["step", f"{name}_scale"], [f"{name}_step"]),
        Node("Mul", [f"{name}_real", f"{name}_step"], [gives]),
    ]


def _levels(rows: Reals) -> tuple[NDArray[np.int8], Reals]:
    """int8 rows, and the scale of each."""
    scale = (np.abs(rows).max(axis=1) / 127 + 1e-12).astype(np.float32)
    return np.round(rows / scale[:, None]).astype(np.int8), scale


def _shares(bags: Bags) -> tuple[NDArray[np.int64], Reals]:
    """The features of a batch, and each text's weights of them, over the root of its length."""
    touched, places = np.unique(np.concatenate(bags), return_inverse=True)
    shares = np.zeros((len(bags), len(touched)), np.float32)
    np.add.at(shares, (np.repeat(np.arange(len(bags)), [len(bag) for bag in bags]), places), 1.0)
    lengths = np.sqrt(np.maximum(1.0, shares.sum(axis=1, keepdims=True)))
    return touched, (shares / lengths).astype(np.float32)


def _thinned(bag: NDArray[np.int64], draw: np.random.Generator) -> NDArray[np.int64]:
    return bag[draw.random(len(bag)) >= DROPOUT]


def _push(odds: Reals, intents: NDArray[np.int64]) -> Reals:
    """The cross entropy's gradient."""
    push = _softmax(odds)
    push[np.arange(len(intents)), intents] -= 1
    push /= len(intents)
    return push


def _softmax(odds: Reals) -> Reals:
    powers: Reals = np.exp(odds - odds.max(axis=1, keepdims=True))
    powers /= powers.sum(axis=1, keepdims=True)
    return powers
