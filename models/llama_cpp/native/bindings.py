"""The llama.cpp calls that the engine makes, typed, and llama.cpp's log as a Python logger.

llama.h (github.com/ggml-org/llama.cpp, include/llama.h) is the reference; llama-cpp-python provides the shared library
and the structs. The functions are bound again with plain integers for pointers, so that ctypes creates no pointer
objects in a step.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

import llama_cpp
import llama_cpp.llama_cpp as native

from causeway_server.router.errors import EngineUnavailable

log = logging.getLogger(__name__)
_LEVELS = {1: logging.DEBUG, 2: logging.DEBUG, 3: logging.INFO, 4: logging.WARNING}  # ggml.h, enum ggml_log_level
_ERROR = 4
_CONTINUED = 5
_errors: deque[str] = deque(maxlen=6)  # the last error lines of llama.cpp's log

_PTR, _INT, _SIZE, _BOOL = ctypes.c_void_p, ctypes.c_int32, ctypes.c_size_t, ctypes.c_bool
_TEXT, _FLOAT = ctypes.c_char_p, ctypes.c_float

VERSION: str = llama_cpp.__version__
Pointer = int


def _bind(name: str, arguments: list[type], result: type | None) -> Callable[..., int]:
    function = native._lib[name]  # noqa: SLF001 - a new function object: llama-cpp-python's keeps its own types
    function.argtypes, function.restype = arguments, result
    bound: Callable[..., int] = function
    return bound


decode = _bind("llama_decode", [_PTR, native.llama_batch], _INT)
set_causal = _bind("llama_set_causal_attn", [_PTR, _BOOL], None)
set_threads = _bind("llama_set_n_threads", [_PTR, _INT, _INT], None)
get_logits = _bind("llama_get_logits", [_PTR], _PTR)
get_embeddings = _bind("llama_get_embeddings", [_PTR], _PTR)
sample = _bind("llama_sampler_sample", [_PTR, _PTR, _INT], _INT)
init_adapter = _bind("llama_adapter_lora_init", [_PTR, _TEXT], _PTR)
invocation_tokens = _bind("llama_adapter_get_alora_n_invocation_tokens", [_PTR], ctypes.c_uint64)
set_adapters = _bind("llama_set_adapters_lora", [_PTR, _PTR, _SIZE, _PTR], _INT)
free_sampler = _bind("llama_sampler_free", [_PTR], None)
chain_init = _bind("llama_sampler_chain_init", [native.llama_sampler_chain_params], _PTR)
chain_add = _bind("llama_sampler_chain_add", [_PTR, _PTR], None)
init_top_k = _bind("llama_sampler_init_top_k", [_INT], _PTR)
init_top_p = _bind("llama_sampler_init_top_p", [_FLOAT, _SIZE], _PTR)
init_min_p = _bind("llama_sampler_init_min_p", [_FLOAT, _SIZE], _PTR)
init_temp = _bind("llama_sampler_init_temp", [_FLOAT], _PTR)
init_dist = _bind("llama_sampler_init_dist", [ctypes.c_uint32], _PTR)
sequence_copy = _bind("llama_memory_seq_cp", [_PTR, _INT, _INT, _INT, _INT], None)
sequence_remove = _bind("llama_memory_seq_rm", [_PTR, _INT, _INT, _INT], _BOOL)
state_size = _bind("llama_state_seq_get_size", [_PTR, _INT], _SIZE)
state_get = _bind("llama_state_seq_get_data", [_PTR, _PTR, _SIZE, _INT], _SIZE)
state_set = _bind("llama_state_seq_set_data", [_PTR, _PTR, _SIZE, _INT], _SIZE)
tokenize = _bind("llama_tokenize", [_PTR, _TEXT, _INT, _PTR, _INT, _BOOL, _BOOL], _INT)


@native.llama_log_callback  # type: ignore[untyped-decorator]
def on_log(level: int, text: bytes, _user: object) -> None:
    line = text.decode(errors="replace").strip()
    if not line or level == _CONTINUED:
        return
    if level == _ERROR:
        _errors.append(line)
    log.log(_LEVELS.get(level, logging.DEBUG), "%s", line)


def start_backend() -> None:
    """Initialise the library (idempotent) and redirect its log, which is global to the process."""
    # Without it a failed assertion starts a debugger on the process, which takes seconds and floods the log.
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    native.llama_log_set(on_log, ctypes.c_void_p(0))
    native.llama_backend_init()


def load_model(path: Path, **params: int) -> Pointer:
    """Load a GGUF file, with these fields of `llama_model_params`. Raises EngineUnavailable."""
    start_backend()
    clear_errors()
    settings = native.llama_model_default_params()
    for name, value in params.items():
        setattr(settings, name, value)
    model: Pointer = native.llama_model_load_from_file(str(path).encode(), settings)
    if not model:
        raise EngineUnavailable(f"{path}: llama.cpp cannot load the file: {last_errors() or 'it does not say why'}")
    return model


def clear_errors() -> None:
    """Forget the recorded error lines."""
    _errors.clear()


def last_errors() -> str:
    """Return the last error lines that llama.cpp logged, "" for none."""
    return "; ".join(dict.fromkeys(_errors))
