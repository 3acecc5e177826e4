"""GGUF at fewer bits, by llama.cpp's own quantiser."""

from __future__ import annotations

import ctypes
from pathlib import Path

import llama_cpp

from .spec import ArtifactError

# llama.cpp's `enum llama_ftype` (include/llama.h).
QUANTISATIONS = {"F16": 1, "Q4_0": 2, "Q8_0": 7, "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18}
GGML_Q4_0 = 2  # `enum ggml_type`
_QUIET = llama_cpp.llama_log_callback(lambda level, text, data: None)


def quantize(source: Path, target: Path, to: str, *, embedding_too: bool = False, threads: int = 2) -> None:
    """Write `target` from `source` (F32 or F16). Q4_0 leaves a tied embedding at Q6_K unless `embedding_too`.

    Raises ArtifactError for an unknown kind or when llama.cpp refuses.
    """
    if to not in QUANTISATIONS:
        raise ArtifactError(f"unknown quantisation {to!r}; there are: {', '.join(QUANTISATIONS)}")
    llama_cpp.llama_backend_init()
    llama_cpp.llama_log_set(_QUIET, ctypes.c_void_p(0))
    params = llama_cpp.llama_model_quantize_default_params()
    params.nthread = threads
    params.ftype = QUANTISATIONS[to]
    if embedding_too and to == "Q4_0":
        params.token_embedding_type = GGML_Q4_0
        params.output_tensor_type = GGML_Q4_0
    failed = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params))
    if failed:
        raise ArtifactError(f"{source}: llama.cpp could not quantise it to {to} (code {failed})")
