"""Which encoders this box has: a package that is installed, and where it brings none, a model that was pulled.

Finding them imports nothing of them: that happens in their children, with the first part.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from models.catalog.artifact import ArtifactError, find_artifact
from models.signals.lookup import find_signal
from router.types import Modality

if TYPE_CHECKING:
    from models.modalities.process.messages import WorkerSpec

SPEECH_MODEL = "speech"
PICTURES_MODEL = "pictures"
NO_SPEECH = (
    "this box has nothing that understands speech: `pip install 'causeway[voice]'`, then `causeway-models pull "
    f"{SPEECH_MODEL}`, then restart the daemon."
)
PROGRAM = "espeak-ng"
"""Speaks; of the distribution."""
DECODER = "models.modalities.decoding.decoder:PartDecoder"
_GIB = 2**30
_PACKAGES: Mapping[Modality, tuple[str, ...]] = {"audio": ("faster_whisper",), "image": ("rapidocr_onnxruntime", "PIL")}


def find_encoders(model_dirs: Sequence[Path]) -> dict[Modality, WorkerSpec]:
    """Return the encoders of this box by kind of part."""
    found: dict[Modality, WorkerSpec] = {}
    if is_installed("audio"):
        try:
            speech = find_artifact(SPEECH_MODEL, model_dirs)
        except ArtifactError:
            pass  # `doctor` says so
        else:
            options = {"model": str(speech.folder)}
            with contextlib.suppress(ArtifactError):  # it hears without it
                options["words"] = str(find_signal("heard-words", None, model_dirs).path)
            found["audio"] = _spec("models.modalities.encoders.speech:SpeechEncoder", options)
    found["file"] = _spec(DECODER, {})  # a file of text needs no encoder
    if is_installed("image"):
        try:
            options = {"classifier": str(find_artifact(PICTURES_MODEL, model_dirs).path)}
        except ArtifactError:
            options = {}  # text is read all the same
        found["image"] = _spec("models.modalities.encoders.pictures:PictureEncoder", options)
    return found


def is_installed(kind: Modality) -> bool:
    """Whether the packages that encode this kind of part are there; imports none of them."""
    return all(importlib.util.find_spec(package) is not None for package in _PACKAGES[kind])


def find_program(environ: Mapping[str, str]) -> str | None:
    """Return the path of the program that speaks; None where it is not installed."""
    return shutil.which(PROGRAM, path=environ.get("PATH", ""))


def _spec(worker: str, options: dict[str, str]) -> WorkerSpec:
    from models.modalities.process.messages import WorkerSpec

    return WorkerSpec(worker, options=options, memory_bytes=2 * _GIB)
