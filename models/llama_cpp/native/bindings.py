"""The few llama.cpp calls that the engine makes, with types, and its log on Python's logging.

llama.h (github.com/ggml-org/llama.cpp, include/llama.h) is the reference; llama-cpp-python has the shared library and
the structs. Calls of each step are bound anew with plain integers for pointers: ctypes then makes no pointer objects.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections import deque
from collections.abc import Callable

import llama_cpp.llama_cpp as native

_log = logging.getLogger("models.llama_cpp.native")
_LEVELS = {1: logging.DEBUG, 2: logging.DEBUG, 3: logging.INFO, 4: logging.WARNING}  # ggml.h, enum ggml_log_level
_ERROR = 4
_CONTINUED = 5
_complaints: deque[str] = deque(maxlen=6)

Pointer = int
Token = int


def _fast(name: str, arguments: list[type], result: type | None) -> Callable[..., int]:
    function = native._lib[name]  # noqa: SLF001 - a new function object: the shared one keeps its own types
    function.argtypes, function.restype = arguments, result
    bound: Callable[..., int] = function
    return bound


decode = _fast("llama_decode", [ctypes.c_void_p, native.llama_batch], ctypes.c_int32)
get_logits = _fast("llama_get_logits", [ctypes.c_void_p], ctypes.c_void_p)
get_embeddings = _fast("llama_get_embeddings", [ctypes.c_void_p], ctypes.c_void_p)
sample = _fast("llama_sampler_sample", [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32], ctypes.c_int32)
accept = _fast("llama_sampler_accept", [ctypes.c_void_p, ctypes.c_int32], None)
apply = _fast("llama_sampler_apply", [ctypes.c_void_p, ctypes.c_void_p], None)
free_sampler = _fast("llama_sampler_free", [ctypes.c_void_p], None)
chain_init = _fast("llama_sampler_chain_init", [native.llama_sampler_chain_params], ctypes.c_void_p)
chain_add = _fast("llama_sampler_chain_add", [ctypes.c_void_p, ctypes.c_void_p], None)
init_top_k = _fast("llama_sampler_init_top_k", [ctypes.c_int32], ctypes.c_void_p)
init_top_p = _fast("llama_sampler_init_top_p", [ctypes.c_float, ctypes.c_size_t], ctypes.c_void_p)
init_min_p = _fast("llama_sampler_init_min_p", [ctypes.c_float, ctypes.c_size_t], ctypes.c_void_p)
init_temp = _fast("llama_sampler_init_temp", [ctypes.c_float], ctypes.c_void_p)
init_dist = _fast("llama_sampler_init_dist", [ctypes.c_uint32], ctypes.c_void_p)
init_grammar = _fast("llama_sampler_init_grammar", [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p], ctypes.c_void_p)
sequence_copy = _fast(
    "llama_memory_seq_cp", [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32], None
)
sequence_remove = _fast(
    "llama_memory_seq_rm", [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32], ctypes.c_bool
)
state_size = _fast("llama_state_seq_get_size", [ctypes.c_void_p, ctypes.c_int32], ctypes.c_size_t)
state_get = _fast(
    "llama_state_seq_get_data", [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int32], ctypes.c_size_t
)
state_set = _fast(
    "llama_state_seq_set_data", [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int32], ctypes.c_size_t
)
tokenize = _fast(
    "llama_tokenize",
    [
        ctypes.c_void_p,
        ctypes.c_char_p,
        ctypes.c_int32,
        ctypes.c_void_p,
        ctypes.c_int32,
        ctypes.c_bool,
        ctypes.c_bool,
    ],
    ctypes.c_int32,
)


@native.llama_log_callback  # type: ignore[untyped-decorator]
def _on_log(level: int, text: bytes, _user: object) -> None:
    line = text.decode(errors="replace").strip()
    if not line or level == _CONTINUED:
        return
    if level == _ERROR:
        _complaints.append(line)
    _log.log(_LEVELS.get(level, logging.DEBUG), "%s", line)


def start_backend() -> None:
    """Initialise the library (again is harmless) and take over its log, which is the process's, not a context's."""
    # After an assertion llama.cpp would start a debugger on itself, which takes seconds and floods the log.
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    native.llama_log_set(_on_log, ctypes.c_void_p(0))
    native.llama_backend_init()


def forget_complaints() -> None:
    _complaints.clear()


def complaint() -> str:
    """What llama.cpp said last about a failure, "" for nothing."""
    return "; ".join(dict.fromkeys(_complaints))
