"""The importance matrix of any GGUF: the mean squared input of each matrix column, from llama.cpp's own run over texts.

llama.cpp calls back for each operation of its graph (ggml-backend.h, `ggml_backend_sched_eval_callback`); the inputs
of its matrix products are read from the CPU's memory. ggml.h has the layout of `ggml_tensor`, which is that of the
bindings' pinned version.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from causeway_server.models.catalog.artifact import ArtifactError
from causeway_server.models.llama_cpp.native.vocabulary import Vocabulary

_CHUNK_TOKENS = 256
_SOURCES = 10  # GGML_MAX_SRC
_F32, _PRODUCT = 0, b"MUL_MAT"
_QUIET = llama_cpp.llama_log_callback(lambda level, text, data: None)
_Callback = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)


class _Tensor(ctypes.Structure):
    """`struct ggml_tensor`."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * _SOURCES),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * 64),
    )


def importance_of(
    path: Path, texts: Sequence[str], *, threads: int = 2, progress: Callable[[int], None] = lambda done: None
) -> dict[str, NDArray[np.float32]]:
    """Return mean squares, float32 [columns], by the matrix's name in the GGUF, over all tokens of the texts.

    Args:
        progress: called with the number of texts that were read.

    Raises:
        ArtifactError: llama.cpp cannot load or run the file.
    """
    llama_cpp.llama_backend_init()
    llama_cpp.llama_log_set(_QUIET, ctypes.c_void_p(0))
    sums: dict[str, NDArray[np.float64]] = {}
    counts: dict[str, int] = {}
    describe = llama_cpp.llama_cpp._lib["ggml_op_desc"]  # noqa: SLF001 - the bindings do not declare it
    describe.argtypes, describe.restype = [ctypes.c_void_p], ctypes.c_char_p

    def on_operation(pointer: int, asks: bool, _user: int | None) -> bool:
        tensor = _Tensor.from_address(pointer)
        if describe(pointer) != _PRODUCT or not tensor.src[1]:
            return not asks
        matrix, inputs = _Tensor.from_address(tensor.src[0]), _Tensor.from_address(tensor.src[1])
        name = matrix.name.decode()
        if not name.endswith(".weight") or inputs.type != _F32 or inputs.ne[2] * inputs.ne[3] != 1:
            return not asks
        if asks:
            return True
        rows, columns = inputs.ne[1], inputs.ne[0]
        values = np.ctypeslib.as_array((ctypes.c_float * (rows * columns)).from_address(inputs.data))
        squares = np.square(values.reshape(rows, columns), dtype=np.float64).sum(0)
        sums[name] = sums.get(name, 0.0) + squares
        counts[name] = counts.get(name, 0) + rows
        return True

    callback = _Callback(on_operation)
    settings = llama_cpp.llama_model_default_params()
    settings.use_extra_bufts = False  # repacked matrices are not multiplied by MUL_MAT of plain rows
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), settings)
    if not model:
        raise ArtifactError(f"{path}: llama.cpp cannot load the file")
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = _CHUNK_TOKENS
    params.n_threads = params.n_threads_batch = threads
    params.cb_eval = ctypes.cast(callback, type(params.cb_eval))
    context = llama_cpp.llama_init_from_model(model, params)
    try:
        if not context:
            raise ArtifactError(f"{path}: llama.cpp cannot allocate a context of {_CHUNK_TOKENS} tokens")
        vocabulary = Vocabulary(model)
        for done, text in enumerate(texts, start=1):
            tokens = vocabulary.encode(text, special=True)[:_CHUNK_TOKENS]
            ids = (llama_cpp.llama_token * len(tokens))(*tokens.tolist())
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
            if len(tokens) and (code := llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(ids, len(ids)))):
                raise ArtifactError(f"{path}: llama_decode failed with code {code}")
            progress(done)
    finally:
        if context:
            llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(model)
    return {name: (total / counts[name]).astype(np.float32) for name, total in sums.items()}
