"""Quantise a GGUF with llama.cpp's quantiser."""

from __future__ import annotations

import ctypes
from pathlib import Path

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from causeway_server.models.catalog.artifact import ArtifactError

# llama.cpp's `enum llama_ftype` (include/llama.h).
QUANTISATIONS = {"F16": 1, "Q4_0": 2, "Q8_0": 7, "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18}
GGML_Q4_0 = 2  # `enum ggml_type`
_QUIET = llama_cpp.llama_log_callback(lambda level, text, data: None)


def quantize(
    source: Path,
    target: Path,
    to: str,
    *,
    embedding_too: bool = False,
    importance: Path | None = None,
    threads: int = 2,
) -> None:
    """Write `target` from `source`: F32 or F16, or a quantised one, whose rounding errors then add to the new ones.

    Args:
        to: one of QUANTISATIONS.
        embedding_too: quantise a tied embedding to Q4_0 as well; Q4_0 leaves it at Q6_K otherwise.
        importance: importance matrix (`causeway-train importance`) that rounding errors are weighted by.

    Raises:
        ArtifactError: the quantisation is unknown, or llama.cpp fails.
    """
    if to not in QUANTISATIONS:
        raise ArtifactError(f"unknown quantisation {to!r}; choose one of {', '.join(QUANTISATIONS)}")
    llama_cpp.llama_backend_init()
    llama_cpp.llama_log_set(_QUIET, ctypes.c_void_p(0))
    params = llama_cpp.llama_model_quantize_default_params()
    params.nthread = threads
    params.ftype = QUANTISATIONS[to]
    params.allow_requantize = True
    if embedding_too and to == "Q4_0":
        params.token_embedding_type = GGML_Q4_0
        params.output_tensor_type = GGML_Q4_0
    columns = _columns(importance) if importance else {}
    entries = _entries(columns)
    if columns:
        params.imatrix = entries
    failed = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params))
    if failed:
        raise ArtifactError(f"{source}: llama.cpp failed to quantise the file to {to} (code {failed})")


def _columns(path: Path) -> dict[str, NDArray[np.float32]]:
    try:
        with np.load(path, allow_pickle=False) as found:
            return {name: np.ascontiguousarray(found[name], dtype=np.float32) for name in found.files}
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path} is not an importance matrix ({error})") from error


def _entries(columns: dict[str, NDArray[np.float32]]) -> ctypes.Array[llama_cpp.llama_model_imatrix_data]:
    """Return the entries as llama.cpp's array, which ends with an entry without a name. The array points into
    `columns`, which must outlive it.
    """
    entries = (llama_cpp.llama_model_imatrix_data * (len(columns) + 1))()
    for entry, (name, values) in zip(entries, columns.items(), strict=False):
        entry.name, entry.size = name.encode(), values.size
        entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    return entries
