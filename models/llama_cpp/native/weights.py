"""Loads a GGUF file with its metadata and LoRA adapters, after a check that it fits into this machine's memory.

Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models"; the files of adapters are what llama.cpp's
`convert_lora_to_gguf.py` makes. llama.cpp frees adapters together with their model.
"""

from __future__ import annotations

import ctypes
import logging
import struct
from collections.abc import Iterable
from pathlib import Path

import llama_cpp.llama_cpp as native

from causeway_server.router.errors import EngineUnavailable, ModelNotFound

from ..protocol import AdapterFile, KVType
from . import bindings, resources

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)  # of the format, docs/gguf.md; 1 was never in wide use
_TEXT_BYTES = 4096
MANY_PART_POSITIONS = (native.LLAMA_ROPE_TYPE_MROPE, native.LLAMA_ROPE_TYPE_IMROPE)
log = logging.getLogger(__name__)


class Weights:
    """The native model, with its properties as plain attributes."""

    def __init__(self, path: Path, gpu_layers: int = 0) -> None:
        """Load a GGUF file. Raises EngineUnavailable if it is missing, unusable, or does not fit in memory."""
        self.path = path
        self.size_bytes = _check_header(path)
        resources.check_weights_fit(path, self.size_bytes, resources.free_bytes())
        self.pointer = bindings.load_model(path, n_gpu_layers=gpu_layers)
        if not native.llama_model_has_decoder(self.pointer) or native.llama_model_is_diffusion(self.pointer):
            self.close()
            raise EngineUnavailable(f"{path}: the model does not generate token by token.")
        model = self.pointer
        self.architecture = self.metadata("general.architecture")
        self.name = self.metadata("general.name") or self.path.stem
        self.trained_context = int(native.llama_model_n_ctx_train(model))  # tokens
        self.embedding_dimensions = int(native.llama_model_n_embd(model))
        self.input_dimensions = int(native.llama_model_n_embd_inp(model))  # of a vector in a token's place
        # llama.cpp spreads a token's position to all parts by itself, and a vector's not (M-RoPE).
        self.positions_have_parts = native.llama_model_rope_type(model) in MANY_PART_POSITIONS
        self.chat_template = (native.llama_model_chat_template(model, None) or b"").decode(errors="replace")
        self.refuse_token = self.metadata("causeway.refuse_token")
        # The state of a recurrent model is not a list of cells of which another sequence could use the first ones.
        self.shares_prefixes = not (native.llama_model_is_recurrent(model) or native.llama_model_is_hybrid(model))
        self.window_tokens = int(native.llama_model_n_swa(model))  # that some layers see; 0: all layers see all
        heads = max(1, int(native.llama_model_n_head(model)))
        head_width = self.embedding_dimensions // heads
        key = int(self.metadata(f"{self.architecture}.attention.key_length") or head_width)
        value = int(self.metadata(f"{self.architecture}.attention.value_length") or head_width)
        layers, kv_heads = int(native.llama_model_n_layer(model)), int(native.llama_model_n_head_kv(model))
        self._kv_elements = layers * kv_heads * (key + value)  # of one token
        self._head_widths = (key, value)

    def kv_bytes_per_token(self, kv_type: KVType) -> int:
        """Return the bytes of one token's keys and values. Raises EngineUnavailable for an unsuitable type."""
        if kv_type == "q8_0" and any(width % resources.Q8_BLOCK for width in self._head_widths):
            widths = " and ".join(map(str, dict.fromkeys(self._head_widths)))
            raise EngineUnavailable(
                f"{self.path}: engine.kv_type q8_0 needs heads whose width is a multiple of {resources.Q8_BLOCK}, but "
                f"this model's heads have {widths}. Set engine.kv_type to f16."
            )
        return max(1, int(self._kv_elements * resources.KV_BYTES[kv_type]))

    def metadata(self, key: str) -> str:
        """Return a metadata value as text, "" if the file does not have it."""
        buffer = ctypes.create_string_buffer(_TEXT_BYTES)
        length = native.llama_model_meta_val_str(self.pointer, key.encode(), buffer, _TEXT_BYTES)
        return buffer.value.decode(errors="replace") if length >= 0 else ""

    def close(self) -> None:
        if self.pointer:
            native.llama_model_free(self.pointer)
            self.pointer = 0


def _check_header(path: Path) -> int:
    """Return the size in bytes of a file that begins like a GGUF; llama.cpp checks the rest."""
    try:
        with path.open("rb") as file:
            head = file.read(8)
        size = path.stat().st_size
    except OSError as error:
        raise EngineUnavailable(f"{path}: {error.strerror}") from error
    if head[:4] != _MAGIC:
        raise EngineUnavailable(f"{path} is not a GGUF file (it begins with {head[:4]!r}).")
    version = struct.unpack("<I", head[4:8])[0] if len(head) == 8 else 0
    if version > max(_VERSIONS):
        raise EngineUnavailable(
            f"{path}: GGUF version {version} is newer than this llama.cpp reads ({max(_VERSIONS)})."
        )
    if version not in _VERSIONS:
        raise EngineUnavailable(f"{path}: llama.cpp does not read GGUF version {version}.")
    return size


class Adapter:
    """An adapter with its scale, as arguments of `llama_set_adapters_lora`."""

    def __init__(self, name: str, pointer: bindings.Pointer, scale: float) -> None:
        self.name = name
        self.pointers = (ctypes.c_void_p * 1)(pointer)
        self.scales = (ctypes.c_float * 1)(scale)


class Adapters:
    """The adapters of one model by name. An adapter that cannot be loaded fails only the jobs that name it."""

    def __init__(self, weights: Weights, files: Iterable[AdapterFile]) -> None:
        """Load the adapters, and log those that fail."""
        self._model = weights.name
        self._loaded: dict[str, Adapter] = {}
        self._problems: dict[str, str] = {}
        for file in files:
            try:
                self._loaded[file.name] = load_adapter(weights, file)
            except EngineUnavailable as error:
                log.error("The adapter %s cannot be used: %s.", file.name, error.message)
                self._problems[file.name] = error.message

    def find(self, name: str) -> Adapter | None:
        """Return a job's adapter; None for "", the model alone. Raises ModelNotFound, or EngineUnavailable."""
        if not name:
            return None
        if name in self._problems:
            raise EngineUnavailable(f"The adapter {name} cannot be used: {self._problems[name]}")
        if name not in self._loaded:
            known = ", ".join(self._loaded) or "none"
            raise ModelNotFound(f"{self._model} has no adapter `{name[:100]}`. Its adapters: {known}", param="model")
        return self._loaded[name]


def load_adapter(weights: Weights, file: AdapterFile) -> Adapter:
    """Load an adapter of the model. Raises EngineUnavailable, also for one of another model."""
    bindings.clear_errors()
    pointer = bindings.init_adapter(weights.pointer, file.path.encode())
    if not pointer:
        reason = bindings.last_errors() or "it does not say why"
        raise EngineUnavailable(
            f"{file.path}: llama.cpp cannot load the file as an adapter of {weights.path}: {reason}"
        )
    if bindings.invocation_tokens(pointer):
        raise EngineUnavailable(
            f"{file.path} is an activated LoRA (aLoRA), which begins inside a prompt and is not supported."
        )
    return Adapter(file.name, pointer, file.scale)
