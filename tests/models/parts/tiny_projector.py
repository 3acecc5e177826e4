"""A projector from nothing: a black image becomes the rows of some words, a white one those of others."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from causeway_server.models.catalog.artifact import Artifact, Manifest, ProjectorEntry, save_manifest, sha256_of
from causeway_server.models.pull.onnx_writer import FLOAT, UINT8, Node, Port, write_onnx

ENCODER = "brightness"
_SIDE = 4


def add_projector(model: Artifact, black: NDArray[np.float32], white: NDArray[np.float32]) -> Artifact:
    """Write the encoder beside the model's folder, and the projector into it.

    Args:
        black, white: [tokens, dimensions].
    """
    encoder = _write_encoder(model.folder.parent / ENCODER)
    path = model.folder / "projector.onnx"
    shape = [1, *black.shape]
    write_onnx(
        path,
        "tiny_projector",
        [Node("Mul", ["features", "step"], ["scaled"]), Node("Add", ["scaled", "black"], ["embeddings"])],
        inputs=[Port("features", FLOAT, ["images", 1, 1])],
        outputs=[Port("embeddings", FLOAT, ["images", *black.shape])],
        constants={"black": black.reshape(shape), "step": (white - black).reshape(shape)},
    )
    entry = ProjectorEntry(
        file=path.name,
        sha256=sha256_of(path),
        size_bytes=path.stat().st_size,
        model_sha256=model.manifest.sha256,
        encoder=ENCODER,
        encoder_sha256=encoder.manifest.sha256,
        tokens=len(black),
    )
    return save_manifest(msgspec.structs.replace(model.manifest, projector=entry), model.folder)


def _write_encoder(folder: Path) -> Artifact:
    """The mean brightness of an image, 0 to 1."""
    folder.mkdir()
    path = folder / "model.onnx"
    write_onnx(
        path,
        ENCODER,
        [
            Node("Cast", ["pixels"], ["values"], {"to": FLOAT}),
            Node("ReduceMean", ["values", "axes"], ["mean"], {"keepdims": 1}),
            Node("Div", ["mean", "full"], ["share"]),
            Node("Squeeze", ["share", "last"], ["features"]),
        ],
        inputs=[Port("pixels", UINT8, ["images", _SIDE, _SIDE, 3])],
        outputs=[Port("features", FLOAT, ["images", 1, 1])],
        constants={
            "axes": np.array([1, 2, 3], np.int64),
            "full": np.array(255.0, np.float32),
            "last": np.array([3], np.int64),
        },
    )
    size = path.stat().st_size
    manifest = Manifest(ENCODER, path.name, sha256_of(path), size, "onnx", "mean", "F32", 0, "Apache-2.0")
    return save_manifest(manifest, folder)
