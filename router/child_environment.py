"""The environment of child processes that read untrusted files: weights, media files, bundles.

The daemon's own environment may hold the cloud's token, API keys and the credentials of a job store. A child gets only
the variables that it needs to start, to find its packages and models, and to use the processors, so that a fault in a
decoder cannot reveal a key.
"""

from __future__ import annotations

from collections.abc import Mapping

_NAMES = frozenset(
    (
        *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TERM", "TMPDIR", "VIRTUAL_ENV"),
        *("XDG_DATA_HOME", "XDG_DATA_DIRS", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE"),
        *("MTMD_CPP_LIB", "LLAMA_CPP_LIB_PATH", "ORT_DISABLE_TELEMETRY", "COVERAGE_PROCESS_START"),
    )
)
_PREFIXES = (
    *("LC_", "LD_", "PYTHON", "MALLOC_"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_"),
    *("CUDA_", "NVIDIA_", "NCCL_", "ROCR_", "HIP_", "HSA_", "GGML_", "VK_"),
)


def minimal_environment(environ: Mapping[str, str], *more: str) -> dict[str, str]:
    """Return the variables of `environ` that a child needs. `more`: further prefixes of names."""
    prefixes = (*_PREFIXES, *more)
    return {name: value for name, value in environ.items() if name in _NAMES or name.startswith(prefixes)}
