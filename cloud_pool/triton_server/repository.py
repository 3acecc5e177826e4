"""Writes the model repository that `tritonserver` reads, in a folder that lives as long as the server.

<folder>/<model>/config.pbtxt    copied from triton_models/<template>
                 1/model.py
                 1/model.json    an engine's options (EngineOptions) or an encoder's (EncoderOptions); weights are named
                                 by path, never copied
"""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec

from models.llama_cpp.protocol import EngineOptions

from .encoder_runtime import EncoderOptions

TEMPLATES = Path(__file__).parent / "triton_models"


class ServedModel(msgspec.Struct, frozen=True):
    """A model under the name that Triton gives it."""

    name: str
    options: EngineOptions | EncoderOptions

    @property
    def template(self) -> str:
        return "llama_cpp" if isinstance(self.options, EngineOptions) else "encoder"


def write_repository(folder: Path, models: tuple[ServedModel, ...], *, has_gpu: bool = False) -> None:
    """Write one model folder for each of `models` into `folder`.

    Args:
        has_gpu: llama.cpp finds a GPU. Models that use it are one instance on the first one: each spreads its layers
            over all GPUs by itself.
    """
    for model in models:
        target = folder / model.name
        shutil.copytree(TEMPLATES / model.template, target, ignore=shutil.ignore_patterns("__pycache__"))
        if has_gpu and isinstance(model.options, EngineOptions) and model.options.gpu_layers != 0:
            config = target / "config.pbtxt"
            config.write_text(config.read_text().replace("kind: KIND_CPU", "kind: KIND_GPU gpus: [ 0 ]"))
        (target / "1" / "model.json").write_bytes(msgspec.json.encode(model.options))
