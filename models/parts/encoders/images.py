"""Reading of the text in an image, and classification of the image.

Text: PP-OCRv4 by RapidOCR on ONNX Runtime; its models are in its package. Classification: an ImageNet classifier in
ONNX, if the owner has pulled one; its labels are in the file's metadata.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
from PIL import Image

from causeway_server.router.types import Fact, Label

from ..process.child import Link
from ..process.messages import Found, ImagePixels, Refusal, Segment, WorkerJob, WorkerResult, WorkerSpec

_SHORTER = 1.143  # of the square that the network sees: the margin around it is cut off, as in training
_AT_MOST = 3  # labels
_MIN_PROBABILITY = 0.1  # probability of a label
_MIN_CONFIDENCE = 0.5  # of a line
_THREADS = 2


class ImageClassifier:
    """An ImageNet classifier. `path`: ONNX file that `models.pull.efficientnet` wrote."""

    def __init__(self, path: Path, threads: int) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self._side = int(self._session.get_inputs()[0].shape[0])
        self._labels = self._session.get_modelmeta().custom_metadata_map["labels"].split("\n")

    def __call__(self, image: ImagePixels) -> tuple[Label, ...]:
        """Return the most probable labels; () if none is probable."""
        rgb = Image.frombytes("RGB", (image.width, image.height), image.pixels)
        (probabilities,) = self._session.run(["probabilities"], {"pixels": _square(rgb, self._side)})
        best = np.argsort(probabilities)[::-1][:_AT_MOST]
        return tuple(
            Label(self._labels[at], round(float(p), 4)) for at in best if (p := probabilities[at]) >= _MIN_PROBABILITY
        )


def _square(image: Image.Image, side: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Return the middle of the image, scaled to [side, side, 3]."""
    scale = side * _SHORTER / min(image.size)
    width, height = (max(side, round(size * scale)) for size in image.size)
    left, top = (width - side) // 2, (height - side) // 2
    resized = image.resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(resized.crop((left, top, left + side, top + side)), np.uint8)


class ImageEncoder:
    """Reads an image's lines of text, from top to bottom. `spec.options`: `classifier`: ONNX file or ""."""

    def __init__(self, spec: WorkerSpec) -> None:
        from rapidocr_onnxruntime import RapidOCR  # the classifier needs none of it

        self._read = RapidOCR(intra_op_num_threads=_THREADS, inter_op_num_threads=1, text_score=_MIN_CONFIDENCE)
        path = spec.options.get("classifier", "")
        self._classify = ImageClassifier(Path(path), _THREADS) if path else None

    def run(self, job: WorkerJob, link: Link) -> WorkerResult:
        if not isinstance(job, ImagePixels):
            raise Refusal("it is not an image")
        pixels = np.frombuffer(job.pixels, np.uint8).reshape(job.height, job.width, 3)
        lines, _ = self._read(np.ascontiguousarray(pixels[:, :, ::-1]))  # OpenCV's order
        segments = tuple(Segment(text, float(score)) for _, text, score in lines or ())
        weights = [len(line.text) for line in segments]
        confidence = sum(len(line.text) * line.confidence for line in segments) / sum(weights) if segments else 1.0
        labels = () if self._classify is None else self._classify(job)
        return Found(Fact("\n".join(line.text for line in segments), confidence, labels=labels), segments)
