"""The projector of a language model and its image encoder, which are only used together.

The `mmproj` file of a vision model contains both. Its header gives its family and the memory that its process needs.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from .artifact import (
    Artifact,
    ArtifactCorrupt,
    ArtifactError,
    ProjectorEntry,
    find_artifact,
    sha256_of,
    verify_artifact,
)

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
    """A checked projector. Paths are resolved, as folders of links may be deleted. `digest` identifies the projector.

    `encoder` and `tokens` are None and 0 for an mmproj file; `memory_bytes` is the memory that its process needs.
    """

    path: Path
    digest: str
    model: Path
    encoder: Path | None
    tokens: int
    memory_bytes: int = 2**30


def find_projector(model: str, model_dirs: Sequence[Path] = ()) -> Projector | None:
    """Return the projector that a model's manifest names; None if it names none.

    Raises:
        ArtifactNotFound: There is no such model, or the encoder or a file is missing.
        ArtifactCorrupt: It was made for other weights or another encoder, or a file is not what its manifest says.
        ArtifactError: It is an mmproj file, and this build of llama.cpp cannot use one.
    """
    artifact = find_artifact(model, model_dirs)
    entry = artifact.manifest.projector
    if entry is None:
        return None
    encoder = find_artifact(entry.encoder, model_dirs) if entry.encoder else None
    if encoder is not None:
        verify_artifact(encoder)
    _check_bound(artifact, entry, encoder)
    for name, sha256 in entry.files.items():
        if not _has_hash(artifact.folder / name, sha256):
            what = "projector" if name == entry.file else "projector's encoder"
            raise ArtifactCorrupt(
                f"{artifact.folder / name}: the {what} is missing, or is not the one that the manifest describes"
            )
    path = artifact.folder / entry.file
    if not entry.is_mmproj:
        encoder_path = artifact.folder / entry.encoder_file if encoder is None else encoder.path
        digest = f"{entry.sha256} {entry.encoder_sha256}"
        return Projector(path.resolve(), digest, artifact.path.resolve(), encoder_path.resolve(), entry.tokens)
    check_mtmd(path)
    # The tokens around an image are those of the model's vocabulary.
    digest = f"{entry.sha256} {entry.model_sha256}"
    return Projector(path.resolve(), digest, artifact.path.resolve(), None, 0, read_mmproj(path).memory_bytes)


def missing_packages(*, has_encoder: bool) -> list[str]:
    """Return a projector's packages that are not installed. `has_encoder`: it is an ONNX projector, no mmproj file."""
    packages = {"PIL": "Pillow", "onnxruntime": "onnxruntime"} if has_encoder else {"PIL": "Pillow"}
    return [name for module, name in packages.items() if importlib.util.find_spec(module) is None]


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


def _check_bound(model: Artifact, entry: ProjectorEntry, encoder: Artifact | None) -> None:
    bound = [(model.name, entry.model_sha256, model.manifest.sha256)]
    if encoder is not None:
        bound.append((entry.encoder, entry.encoder_sha256, encoder.manifest.sha256))
    for name, wanted, found in bound:
        if wanted != found:
            raise ArtifactCorrupt(
                f"{model.folder / entry.file}: the projector was made for {name} with SHA-256 {wanted[:12]}, but the "
                f"installed one has {found[:12]}: train the projector for it, or install the earlier one again"
            )


class MmprojFile(msgspec.Struct, frozen=True):
    """A checked mmproj file. `kind`: family such as gemma3. `memory_bytes`: of the process that reads images."""

    kind: str
    memory_bytes: int


def read_mmproj(path: Path) -> MmprojFile:
    """Read the header of an mmproj file.

    Raises:
        ArtifactError: The file is not a complete GGUF, or not an mmproj file with a vision encoder.
    """
    from .gguf import read_gguf, read_metadata  # gguf brings numpy

    gguf = read_gguf(path)
    if gguf.architecture != "clip":
        raise ArtifactError(
            f"{path}: a model of the architecture {gguf.architecture}, not an mmproj file; llama.cpp's "
            "convert_hf_to_gguf.py --mmproj converts a vision model"
        )
    values = read_metadata(path, lambda key: key.startswith("clip."))
    if not values.get("clip.has_vision_encoder"):
        raise ArtifactError(f"{path}: an mmproj file without an image encoder")
    side, patch, width, hidden = (_number(values, name) for name in _NUMBERS)
    patches = max((side // patch) ** 2, _MAX_PATCHES) if patch else _MAX_PATCHES
    kind = values.get("clip.vision.projector_type") or values.get("clip.projector_type") or "unknown"
    buffers_bytes = 4 * patches * (_ROWS * width + 2 * hidden)
    return MmprojFile(str(kind), gguf.tensors_bytes + buffers_bytes + _PROCESS_BYTES)


def vision_bytes(model: Artifact) -> int:
    """Return the bytes of a vision model's image process; 0 for other models. Raises ArtifactError."""
    entry = model.manifest.projector
    return 0 if entry is None or not entry.is_mmproj else read_mmproj(model.folder / entry.file).memory_bytes


def _number(values: dict[str, object], name: str) -> int:
    value = values.get(f"clip.vision.{name}")
    return value if isinstance(value, int) and 0 <= value < 2**20 else 0
