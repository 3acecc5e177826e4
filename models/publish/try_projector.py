"""Try a projector in ONNX with its picture encoder: a black picture becomes soft tokens of the model, or does not."""

from __future__ import annotations

from pathlib import Path

from ..catalog.artifact import ArtifactError
from ..modalities.process.messages import Picture, WorkerSpec

_SIDE = 8  # of the picture, in pixels
_FLOAT_BYTES = 4


def try_projector(projector: Path, encoder: Path, width: int, tokens: int) -> None:
    """Encode a picture in this process, which needs Pillow and onnxruntime.

    Args:
        projector: reads the features of `encoder`, both ONNX files.
        width: of the language model's embeddings.
        tokens: that a picture becomes.

    Raises:
        ArtifactError: the files cannot be read, do not fit each other, or give another number of values.
    """
    from ..modalities.encoders.projector import PictureProjector

    try:
        worker = PictureProjector(WorkerSpec("", options={"encoder": str(encoder), "projector": str(projector)}))
        vectors = worker.project(Picture(bytes(_SIDE * _SIDE * 3), _SIDE, _SIDE)).vectors
    except Exception as error:  # onnxruntime has classes of its own, which are none of Python's
        reason = (str(error).splitlines() or [""])[0]
        raise ArtifactError(f"{projector}: it cannot be used with its encoder: {reason}") from error
    if len(vectors) != tokens * width * _FLOAT_BYTES:
        values = len(vectors) // _FLOAT_BYTES
        raise ArtifactError(
            f"{projector}: {values} values for a picture; the model takes {tokens} tokens of {width} values"
        )
