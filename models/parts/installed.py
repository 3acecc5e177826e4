"""The encoders and voices of this machine: installed packages, and pulled models for packages without one.

Finding the packages does not import them; their children do, when the first part arrives.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from causeway_server.router.child_environment import minimal_environment
from causeway_server.router.types import Modality

from ..catalog.artifact import ArtifactError, find_artifact, find_signal
from .process.messages import WorkerSpec

SPEECH_MODEL = "speech"
ENCODERS: Mapping[str, Modality] = {SPEECH_MODEL: "audio", "images": "image", "files": "file"}
"""The kind of part that each encoder reads, by the encoder's name."""
EXTRAS: Mapping[Modality, str] = {"audio": "voice", "image": "images"}
NO_SPEECH = (
    "This device has no speech model: run `pip install 'causeway-router[voice]'`, then `causeway-models "
    f"pull {SPEECH_MODEL}`, then restart the daemon."
)
PROGRAM = "espeak-ng"
"""The text-to-speech program, from the distribution's packages."""
DECODER = "causeway_server.models.parts.decoding.decoder:PartDecoder"
_GIB = 2**30
_WORKERS: Mapping[Modality, str] = {
    "audio": "causeway_server.models.parts.encoders.speech:SpeechEncoder",
    "image": "causeway_server.models.parts.encoders.images:ImageEncoder",
    "file": DECODER,  # a file of text needs no encoder
}
_PACKAGES: Mapping[Modality, tuple[str, ...]] = {"audio": ("faster_whisper",), "image": ("rapidocr_onnxruntime", "PIL")}


def find_encoders(model_dirs: Sequence[Path]) -> dict[Modality, WorkerSpec]:
    """Return the encoders of this machine by kind of part."""
    found: dict[Modality, WorkerSpec] = {"file": encoder_spec("file", model_dirs)}
    if is_installed("audio"):
        with contextlib.suppress(ArtifactError):  # reported by `doctor`
            found["audio"] = encoder_spec("audio", model_dirs)
    if is_installed("image"):
        found["image"] = encoder_spec("image", model_dirs)
    return found


def encoder_spec(kind: Modality, model_dirs: Sequence[Path]) -> WorkerSpec:
    """Return the worker that encodes this kind of part. Raises ArtifactError if its model is missing."""
    options: dict[str, str] = {}
    if kind == "audio":
        options["model"] = str(find_artifact(SPEECH_MODEL, model_dirs).folder)
        with contextlib.suppress(ArtifactError):  # optional: it chooses among likely transcripts
            options["words"] = str(find_signal("heard-words", None, model_dirs).path)
    return WorkerSpec(_WORKERS[kind], options=options, memory_bytes=2 * _GIB)


def find_speech_detector() -> WorkerSpec | None:
    """Return the speech detector, whose model is in faster-whisper's wheel; None without that package."""
    package = importlib.util.find_spec("faster_whisper")
    if package is None or package.origin is None:
        return None
    model = Path(package.origin).parent / "assets" / "silero_vad_v6.onnx"
    if not model.is_file() or importlib.util.find_spec("onnxruntime") is None:
        return None
    return WorkerSpec(
        "causeway_server.models.parts.encoders.voice_activity:SpeechDetector", options={"model": str(model)}
    )


def is_installed(kind: Modality) -> bool:
    """Return whether the packages that encode this kind of part are installed, without importing them."""
    return all(importlib.util.find_spec(package) is not None for package in _PACKAGES[kind])


def is_installed_in(python: str, kind: Modality) -> bool:
    """Return whether another Python has the packages for this kind of part. Raises OSError if it does not start."""
    program = "import importlib.util as u, sys; sys.exit(any(u.find_spec(name) is None for name in sys.argv[1:]))"
    packages = ("msgspec", *_PACKAGES.get(kind, ()))
    command, environ = [python, "-P", "-c", program, *packages], minimal_environment(os.environ)
    return subprocess.run(command, env=environ, capture_output=True, check=False).returncode == 0


def find_program(environ: Mapping[str, str]) -> str | None:
    """Return the path of the text-to-speech program; None if it is not installed."""
    return shutil.which(PROGRAM, path=environ.get("PATH", ""))


def is_onnxruntime_installed() -> bool:
    """Return whether onnxruntime, which runs added voices, is installed, without importing it."""
    return importlib.util.find_spec("onnxruntime") is not None
