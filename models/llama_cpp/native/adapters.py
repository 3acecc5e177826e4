"""LoRA adapters of a model, in memory. llama.cpp frees them with the model.

Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models"; the files are what llama.cpp's
`convert_lora_to_gguf.py` makes.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterable

from router.errors import EngineUnavailable, ModelNotFound

from ..protocol import AdapterFile
from . import bindings
from .weights import Weights

_log = logging.getLogger(__name__)


class Adapter:
    """One adapter with its scale, as `llama_set_adapters_lora` takes it."""

    def __init__(self, name: str, pointer: bindings.Pointer, scale: float) -> None:
        self.name = name
        self.pointers = (ctypes.c_void_p * 1)(pointer)
        self.scales = (ctypes.c_float * 1)(scale)


class Adapters:
    """The adapters of one model by name. One that cannot be loaded fails its own jobs only."""

    def __init__(self, weights: Weights, files: Iterable[AdapterFile]) -> None:
        """Load the adapters; what fails is logged."""
        self._model = weights.name
        self._loaded: dict[str, Adapter] = {}
        self._problems: dict[str, str] = {}
        for file in files:
            try:
                self._loaded[file.name] = load_adapter(weights, file)
            except EngineUnavailable as error:
                _log.error("the adapter %s cannot be used: %s", file.name, error.message)
                self._problems[file.name] = error.message

    def find(self, name: str) -> Adapter | None:
        """Return the adapter of a job; None for "", the model as it is.

        Raises:
            ModelNotFound: the model has no such adapter.
            EngineUnavailable: it could not be loaded.
        """
        if not name:
            return None
        if name in self._problems:
            raise EngineUnavailable(f"the adapter {name} cannot be used: {self._problems[name]}")
        if name not in self._loaded:
            known = ", ".join(self._loaded) or "none"
            raise ModelNotFound(f"{self._model} has no adapter `{name[:100]}`; there are: {known}", param="model")
        return self._loaded[name]


def load_adapter(weights: Weights, file: AdapterFile) -> Adapter:
    """Load an adapter of the model.

    Raises:
        EngineUnavailable: the file is missing, is no LoRA adapter, or belongs to another model.
    """
    bindings.clear_errors()
    pointer = bindings.init_adapter(weights.pointer, file.path.encode())
    if not pointer:
        reason = bindings.last_errors() or "it does not say why"
        raise EngineUnavailable(f"{file.path}: llama.cpp cannot load it as an adapter of {weights.path}: {reason}")
    if bindings.invocation_tokens(pointer):
        raise EngineUnavailable(f"{file.path}: an activated LoRA (aLoRA), which begins inside a prompt: not supported")
    return Adapter(file.name, pointer, file.scale)
