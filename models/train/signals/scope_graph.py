"""The ONNX graph of out-of-scope detection: heads, training texts and regressions in one file."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...signals.calibration import LinearLogit
from .onnx_writer import FLOAT, INT64, Constant, Node, Port, write_onnx
from .optimizers import Array32
from .scope_heads import IntentExamples, IntentHeads


def write_scope(heads: IntentHeads, examples: IntentExamples, lines: dict[str, LinearLogit], target: Path) -> None:
    """Write the graph embedding float32 [dimensions], words and letters int64 [n] → told float32 [3] (the regression's
    inputs, `scope.scope_inputs`), odds float32 [intents]. The regressions are metadata.
    """
    dense, dense_scale = _levels(heads.dense.T)
    texts, texts_scale = _levels(examples.vectors)
    constants: dict[str, Constant] = {
        "texts": texts.T.copy(),
        "texts_scale": texts_scale,
        "intents": examples.intents[None],
        "farthest": np.array(-1, np.float32),
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
        Node("ArgMax", ["mean"], ["likeliest"], {"axis": -1}),
        Node("Equal", ["intents", "likeliest"], ["alike"]),
        Node("Where", ["alike", "nearness", "farthest"], ["nearness_own"]),
        Node("ReduceMax", ["nearness_own"], ["own"], {"keepdims": 0}),
        Node("Reshape", ["own", "flat"], ["own1"]),
        Node("Sub", ["one", "own1"], ["far_own"]),
        Node("Concat", ["undecided", "far", "far_own"], ["told"], {"axis": 0}),
    ]
    write_onnx(
        target,
        "scope",
        nodes,
        inputs=[
            Port("embedding", FLOAT, [examples.vectors.shape[1]]),
            Port("words", INT64, ["n"]),
            Port("letters", INT64, ["m"]),
        ],
        outputs=[Port("told", FLOAT, [3]), Port("odds", FLOAT, [heads.intent_count])],
        constants=constants,
        metadata={key: msgspec.json.encode(line).decode() for key, line in lines.items()},
    )


def _bag(view: str) -> list[Node]:
    """Nodes of a head on hashed features: softmax of the sum of their rows over the root of their number."""
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


def _product(name: str, output: str) -> list[Node]:
    """Nodes that multiply the quantised embedding by the int8 matrix `name`, which has one scale per column."""
    return [
        Node("MatMulInteger", ["levels", name, "zero"], [f"{name}_whole"]),
        Node("Cast", [f"{name}_whole"], [f"{name}_real"], {"to": FLOAT}),
        Node("Mul", ["step", f"{name}_scale"], [f"{name}_step"]),
        Node("Mul", [f"{name}_real", f"{name}_step"], [output]),
    ]


def _levels(rows: Array32) -> tuple[NDArray[np.int8], Array32]:
    """Return int8 rows and the scale of each."""
    scale = (np.abs(rows).max(axis=1) / 127 + 1e-12).astype(np.float32)
    return np.round(rows / scale[:, None]).astype(np.int8), scale
