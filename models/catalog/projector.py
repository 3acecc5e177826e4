"""The `mmproj` file of a vision model: image encoder and projector, whose header gives family and memory."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from .artifact import Artifact, ArtifactCorrupt, ArtifactError, find_artifact, sha256_of

_PROCESS_BYTES = 256 * 2**20  # interpreter, libraries, the vocabulary of the language model, an image's pixels
_MAX_PATCHES = 4 * 1024  # of an image of any size: 1,024 tokens, each of 2 × 2 patches
_ROWS = 12  # of a patch's width, kept for a block while it is calculated: an estimate, measured on no real weights
_NUMBERS = ("image_size", "patch_size", "embedding_length", "feed_forward_length")


def has_mtmd() -> bool:
    """Return whether this build of llama.cpp has mtmd, its library of vision models. Loads nothing."""
    bindings = importlib.util.find_spec("llama_cpp")
    if bindings is None or bindings.origin is None:
        return False
    folder = os.environ.get("MTMD_CPP_LIB") or Path(bindings.origin).parent / "lib"  # as the bindings look for it
    return any(Path(folder).glob("libmtmd.*"))


class Projector(msgspec.Struct, frozen=True):
    """A checked projector, identified by `digest`, and its process's memory. Paths are resolved."""

    path: Path
    digest: str
    model: Path
    memory_bytes: int


def find_projector(model: str, model_dirs: Sequence[Path] = ()) -> Projector | None:
    """Return the projector that a model's manifest names; None if it names none.

    Raises ArtifactNotFound without the model, ArtifactCorrupt for a projector of other weights, a missing or changed
    file, and ArtifactError if this build of llama.cpp cannot use it.
    """
    artifact = find_artifact(model, model_dirs)
    entry = artifact.manifest.projector
    if entry is None:
        return None
    path = artifact.folder / entry.file
    if entry.model_sha256 != artifact.manifest.sha256:
        raise ArtifactCorrupt(
            f"{path}: the projector was made for {artifact.name} with SHA-256 {entry.model_sha256[:12]}, but the "
            f"installed model has {artifact.manifest.sha256[:12]}: add the mmproj file of the installed model"
        )
    if not _has_hash(path, entry.sha256):
        raise ArtifactCorrupt(f"{path}: the projector is missing, or is not the one that the manifest describes")
    check_mtmd(path)
    # The tokens around an image are those of the model's vocabulary.
    digest = f"{entry.sha256} {entry.model_sha256}"
    return Projector(path.resolve(), digest, artifact.path.resolve(), read_mmproj(path).memory_bytes)


def has_pillow() -> bool:
    """Return whether Pillow, which decodes images, is installed. Loads nothing."""
    return importlib.util.find_spec("PIL") is not None


def check_mtmd(file: Path) -> None:
    """Check that this build of llama.cpp can use the mmproj file. Raises ArtifactError."""
    if not has_mtmd():
        raise ArtifactError(
            f"{file}: this build of llama.cpp lacks mtmd, which reads mmproj files. Run `make setup` to build it"
        )


def _has_hash(path: Path, sha256: str) -> bool:
    """Return whether a file has the hash of its manifest. The hash is cached until the file changes."""
    try:
        found = path.stat()
        return _hash(path.resolve(), found.st_mtime_ns, found.st_size, found.st_ino) == sha256
    except OSError:
        return False


@functools.lru_cache(maxsize=64)
def _hash(path: Path, *_: int) -> str:
    return sha256_of(path)


class MmprojFile(msgspec.Struct, frozen=True):
    """A checked mmproj file. `kind`: family such as gemma3. `memory_bytes`: of the process that reads images."""

    kind: str
    memory_bytes: int


def read_mmproj(path: Path) -> MmprojFile:
    """Read the header of an mmproj file with a vision encoder. Raises ArtifactError."""
    from .gguf import read_gguf, read_metadata  # gguf brings numpy

    gguf = read_gguf(path)
    if gguf.architecture != "clip":
        raise ArtifactError(
            f"{path} is a model of the architecture {gguf.architecture} and not an mmproj file; llama.cpp's "
            "convert_hf_to_gguf.py --mmproj converts a vision model"
        )
    values = read_metadata(path, lambda key: key.startswith("clip."))
    if not values.get("clip.has_vision_encoder"):
        raise ArtifactError(f"{path} is an mmproj file without an image encoder")
    side, patch, width, hidden = (_number(values, name) for name in _NUMBERS)
    patches = max((side // patch) ** 2, _MAX_PATCHES) if patch else _MAX_PATCHES
    kind = values.get("clip.vision.projector_type") or values.get("clip.projector_type") or "unknown"
    buffers_bytes = 4 * patches * (_ROWS * width + 2 * hidden)
    return MmprojFile(str(kind), gguf.tensors_bytes + buffers_bytes + _PROCESS_BYTES)


def vision_bytes(model: Artifact) -> int:
    """Return the bytes of a vision model's image process; 0 for other models. Raises ArtifactError."""
    entry = model.manifest.projector
    return 0 if entry is None else read_mmproj(model.folder / entry.file).memory_bytes


def _number(values: dict[str, object], name: str) -> int:
    value = values.get(f"clip.vision.{name}")
    return value if isinstance(value, int) and 0 <= value < 2**20 else 0
