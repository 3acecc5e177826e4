"""Add an mmproj file to a language model: copy it beside the weights, and name it in the manifest."""

from __future__ import annotations

from pathlib import Path

from ..catalog.artifact import Artifact
from .check import check_mmproj
from .extend import check_extensible
from .place_mmproj import place_mmproj
from .placing import Placing


def add_mmproj(model: Artifact, file: Path, placing: Placing = "copy") -> Artifact:
    """Add the mmproj file of a vision model, in the place of an earlier one or of a projector.

    Raises:
        ArtifactError: the model cannot have one, llama.cpp cannot use the file with this model, or it cannot be copied.
    """
    check_extensible(model, "an mmproj file")
    check_mmproj(file, model.path)
    return place_mmproj(model, file, placing)
