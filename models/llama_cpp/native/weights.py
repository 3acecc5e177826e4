"""A GGUF file in memory: what it says about itself, and whether this machine can hold it."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path

import llama_cpp.llama_cpp as native

from router.errors import EngineUnavailable

from . import bindings, memory

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)  # of the format, docs/gguf.md; 1 was never in wide use
_F16_BYTES = 2
_TEXT_BYTES = 4096


class Weights:
    """Owns the native model. Raises EngineUnavailable, saying what is wrong with the file or with the machine."""

    def __init__(self, path: Path, gpu_layers: int = 0) -> None:
        self.path = path
        self.bytes = _check_header(path)
        memory.check_weights_fit(path, self.bytes, memory.free_bytes())
        bindings.start_backend()
        bindings.forget_complaints()
        params = native.llama_model_default_params()
        params.n_gpu_layers = gpu_layers
        self.pointer: bindings.Pointer = native.llama_model_load_from_file(str(path).encode(), params)
        if not self.pointer:
            raise EngineUnavailable(
                f"{path}: llama.cpp cannot load it: {bindings.complaint() or 'it does not say why'}"
            )
        if not native.llama_model_has_decoder(self.pointer) or native.llama_model_is_diffusion(self.pointer):
            self.close()
            raise EngineUnavailable(f"{path}: not a model that generates token by token")
        self._describe()

    def _describe(self) -> None:
        model = self.pointer
        self.architecture = self.text("general.architecture")
        self.name = self.text("general.name") or self.path.stem
        self.quantisation = (native.llama_ftype_name(native.llama_model_ftype(model)) or b"").decode()
        self.parameters = int(native.llama_model_n_params(model))
        self.context = int(native.llama_model_n_ctx_train(model))
        self.dimensions = int(native.llama_model_n_embd(model))
        self.template = (native.llama_model_chat_template(model, None) or b"").decode(errors="replace")
        self.refuse_token = self.text("causeway.refuse_token")
        # A sequence's state is then not a list of cells that another one could share a part of.
        self.shares_prefixes = not (native.llama_model_is_recurrent(model) or native.llama_model_is_hybrid(model))
        heads = max(1, int(native.llama_model_n_head(model)))
        width = self.dimensions // heads
        key = int(self.text(f"{self.architecture}.attention.key_length") or width)
        value = int(self.text(f"{self.architecture}.attention.value_length") or width)
        layers, shared_heads = int(native.llama_model_n_layer(model)), int(native.llama_model_n_head_kv(model))
        self.token_bytes = max(1, layers * shared_heads * (key + value) * _F16_BYTES)  # KV cache of one token

    def text(self, key: str) -> str:
        """A metadata value as text, "" when the file has none."""
        buffer = ctypes.create_string_buffer(_TEXT_BYTES)
        length = native.llama_model_meta_val_str(self.pointer, key.encode(), buffer, _TEXT_BYTES)
        return buffer.value.decode(errors="replace") if length >= 0 else ""

    def close(self) -> None:
        if self.pointer:
            native.llama_model_free(self.pointer)
            self.pointer = 0


def _check_header(path: Path) -> int:
    """Size in bytes of a file that begins as a GGUF does; llama.cpp judges the rest."""
    try:
        with path.open("rb") as file:
            head = file.read(8)
        size = path.stat().st_size
    except OSError as error:
        raise EngineUnavailable(f"{path}: {error.strerror}") from error
    if head[:4] != _MAGIC:
        raise EngineUnavailable(f"{path}: not a GGUF file (it begins with {head[:4]!r})")
    version = struct.unpack("<I", head[4:8])[0] if len(head) == 8 else 0
    if version > max(_VERSIONS):
        raise EngineUnavailable(f"{path}: GGUF version {version} is newer than this llama.cpp reads ({max(_VERSIONS)})")
    if version not in _VERSIONS:
        raise EngineUnavailable(f"{path}: GGUF version {version} is not one that llama.cpp reads")
    return size
