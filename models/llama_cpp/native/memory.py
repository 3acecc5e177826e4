"""How many tokens of KV cache: as many as configured, as the model supports, and as memory allows."""

from __future__ import annotations

from pathlib import Path

import msgspec
import psutil

from router.errors import EngineUnavailable

from ..protocol import EngineOptions, KVType

_CGROUP = Path("/sys/fs/cgroup")
_KV_SHARE = 0.4  # of the free memory that the KV cache may take; the rest is for the system and other programs
_DEFAULT_KV_TOKENS = 16384  # for all sequences, unless one context is longer or more are configured
_MIN_CONTEXT = 256  # a shorter context is of no use
_MB = 1024 * 1024
Q8_BLOCK, Q8_BLOCK_BYTES = 32, 34  # ggml-common.h, block_q8_0: 32 values and a scale
KV_BYTES: dict[KVType, float] = {"f16": 2.0, "q8_0": Q8_BLOCK_BYTES / Q8_BLOCK}  # of one value


class MemoryPlan(msgspec.Struct, frozen=True):
    """Sizes that fit this machine."""

    context_tokens: int  # one sequence
    kv_tokens: int  # all sequences together
    prefix_bytes: int  # for prefixes of finished sequences


def free_bytes() -> int:
    """Return the memory that this process may still take: the machine's, or its cgroup's if that is less."""
    free = int(psutil.virtual_memory().available)
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit != "max":
            free = min(free, int(limit) - int((_CGROUP / "memory.current").read_text()))
    except (OSError, ValueError):
        pass
    return max(0, free)


def check_weights_fit(path: Path, size_bytes: int, free: int) -> None:
    """Check that the weights fit in `free` bytes.

    Raises:
        EngineUnavailable: they do not.
    """
    if size_bytes > free:
        raise EngineUnavailable(
            f"{path}: the model needs {size_bytes // _MB} MB and {free // _MB} MB of memory are free; "
            "free some, or use a smaller model"
        )


def plan_memory(
    options: EngineOptions, trained_context: int, kv_bytes_per_token: int, weights_bytes: int, free: int
) -> MemoryPlan:
    """Choose the sizes: (1) configured values bind, (2) else the model's own context, (3) reduced to fit memory.

    Args:
        options: the configured sizes.
        trained_context: the model's own context in tokens.
        kv_bytes_per_token: KV cache of one token.
        weights_bytes: for the error message.
        free: bytes of free memory.

    Raises:
        EngineUnavailable: the configured sizes, or the shortest useful context, do not fit in `free` bytes.
    """
    affordable = int(free * _KV_SHARE) // max(1, kv_bytes_per_token)
    context = _wanted_context(options, trained_context)  # (1), (2)
    if options.context_tokens or options.kv_tokens:
        total = wanted_kv_tokens(options, context)
        needed = min(total, context) if not options.kv_tokens else total
    else:
        context = max(min(context, affordable), min(_MIN_CONTEXT, trained_context))  # (3)
        total = wanted_kv_tokens(options, context)
        needed = min(_MIN_CONTEXT, context)
    if needed * kv_bytes_per_token > free * (1.0 if options.context_tokens or options.kv_tokens else _KV_SHARE):
        raise EngineUnavailable(
            f"a context of {needed} tokens needs {needed * kv_bytes_per_token // _MB} MB of KV cache beside "
            f"{weights_bytes // _MB} MB of weights, and {free // _MB} MB of memory are free; "
            "set engine.context_tokens lower, or use a smaller model"
        )
    if not options.kv_tokens:
        total = max(min(total, affordable), needed)
    return MemoryPlan(
        context_tokens=min(context, total),
        kv_tokens=total,
        prefix_bytes=min(options.prefix_cache_bytes, free // 8),
    )


def wanted_kv_tokens(options: EngineOptions, trained_context: int) -> int:
    """Return the KV cells of all sequences together, where there is memory enough."""
    context = _wanted_context(options, trained_context)
    return options.kv_tokens or max(context, min(context * options.sequences, _DEFAULT_KV_TOKENS))


def _wanted_context(options: EngineOptions, trained_context: int) -> int:
    return min(options.context_tokens or trained_context, trained_context)
