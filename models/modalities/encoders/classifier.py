"""What a picture shows: an ImageNet classifier in ONNX, whose labels are in its metadata."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
from PIL import Image

from router.types import Label

from ..process.messages import Picture

_SHORTER = 1.143  # of the square that the network sees: the margin around it is cut off, as in training
_AT_MOST = 3  # labels
_LEAST = 0.1  # probability of a label


class PictureClassifier:
    """`path`: written by `models.pull.efficientnet`."""

    def __init__(self, path: Path, threads: int) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self._side = int(self._session.get_inputs()[0].shape[0])
        self._labels = self._session.get_modelmeta().custom_metadata_map["labels"].split("\n")

    def __call__(self, picture: Picture) -> tuple[Label, ...]:
        """Return the most probable labels; () if none is probable."""
        image = Image.frombytes("RGB", (picture.width, picture.height), picture.pixels)
        (probabilities,) = self._session.run(["probabilities"], {"pixels": _square(image, self._side)})
        best = np.argsort(probabilities)[::-1][:_AT_MOST]
        return tuple(Label(self._labels[at], round(float(p), 4)) for at in best if (p := probabilities[at]) >= _LEAST)


def _square(image: Image.Image, side: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """The middle of the picture, [side, side, 3]."""
    scale = side * _SHORTER / min(image.size)
    width, height = (max(side, round(size * scale)) for size in image.size)
    left, top = (width - side) // 2, (height - side) // 2
    resized = image.resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(resized.crop((left, top, left + side, top + side)), np.uint8)
