"""The `mmproj` file of a vision model: its header, and the memory that its process needs."""

from __future__ import annotations

from pathlib import Path

import msgspec

from .artifact import Artifact, ArtifactError

_PROCESS_BYTES = 256 * 2**20  # interpreter, libraries, the vocabulary of the language model, a picture's pixels
_LARGEST_PATCHES = 4 * 1024  # of a picture of any size: 1,024 tokens, each of 2 × 2 patches
_ROWS = 12  # of a patch's width, kept for a block while it is calculated: an estimate, measured on no real weights
_NUMBERS = ("image_size", "patch_size", "embedding_length", "feed_forward_length")


class MmprojFile(msgspec.Struct, frozen=True):
    """`kind`: which family of vision models, such as gemma3. `memory_bytes`: of the process that reads pictures."""

    kind: str
    memory_bytes: int


def read_mmproj(path: Path) -> MmprojFile:
    """Read the header.

    Raises:
        ArtifactError: the file is not a complete GGUF, or no mmproj file with a vision encoder.
    """
    from .gguf import read_gguf, read_metadata  # gguf brings numpy

    gguf = read_gguf(path)
    if gguf.architecture != "clip":
        raise ArtifactError(
            f"{path}: a model of the architecture {gguf.architecture}, not an mmproj file; llama.cpp's "
            "convert_hf_to_gguf.py --mmproj makes one of a vision model"
        )
    values = read_metadata(path, lambda key: key.startswith("clip."))
    if not values.get("clip.has_vision_encoder"):
        raise ArtifactError(f"{path}: an mmproj file without an encoder of pictures")
    side, patch, width, hidden = (_number(values, name) for name in _NUMBERS)
    patches = max((side // patch) ** 2, _LARGEST_PATCHES) if patch else _LARGEST_PATCHES
    kind = values.get("clip.vision.projector_type") or values.get("clip.projector_type") or "unknown"
    buffers_bytes = 4 * patches * (_ROWS * width + 2 * hidden)
    return MmprojFile(str(kind), gguf.tensors_bytes + buffers_bytes + _PROCESS_BYTES)


def vision_bytes(model: Artifact) -> int:
    """Return the memory of the process that reads pictures for a vision model; 0 for another. Raises ArtifactError."""
    entry = model.manifest.projector
    return 0 if entry is None or not entry.is_mmproj else read_mmproj(model.folder / entry.file).memory_bytes


def _number(values: dict[str, object], name: str) -> int:
    value = values.get(f"clip.vision.{name}")
    return value if isinstance(value, int) and 0 <= value < 2**20 else 0
