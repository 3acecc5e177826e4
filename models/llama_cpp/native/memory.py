"""How many tokens of KV cache: what was asked, what the model can, what memory allows."""

from __future__ import annotations

from pathlib import Path

import msgspec
import psutil

from router.errors import EngineUnavailable

from ..protocol import EngineOptions

_CGROUP = Path("/sys/fs/cgroup")
_SHARE = 0.4  # of the memory that is free may become KV cache; the rest is the system's and other programs'
_KEPT = 16384  # tokens for all sequences together, unless one context is longer or more were asked for
_FEWEST = 256  # a context shorter than this answers nothing
_MB = 1024 * 1024


class MemoryPlan(msgspec.Struct, frozen=True):
    """Tokens of one sequence and of all together; bytes for prefixes of prompts that ended."""

    context: int
    total: int
    prefix_bytes: int


def free_bytes() -> int:
    """Memory that this process may still take: of the machine, or of its cgroup if that has less."""
    free = int(psutil.virtual_memory().available)
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit != "max":
            free = min(free, int(limit) - int((_CGROUP / "memory.current").read_text()))
    except (OSError, ValueError):
        pass
    return max(0, free)


def check_weights_fit(path: Path, size_bytes: int, free: int) -> None:
    """Raises EngineUnavailable when the weights alone are more than the free memory."""
    if size_bytes > free:
        raise EngineUnavailable(
            f"{path}: the model needs {size_bytes // _MB} MB and {free // _MB} MB of memory are free; "
            "free some, or use a smaller model"
        )


def plan_memory(options: EngineOptions, trained: int, token_bytes: int, weights_bytes: int, free: int) -> MemoryPlan:
    """(1) What was asked binds, (2) else the model's own context, (3) cut to what memory allows.

    `trained` is the model's context in tokens, `token_bytes` the KV of one token. Raises EngineUnavailable when what
    was asked, or the shortest useful context, does not fit in `free` bytes.
    """
    most = int(free * _SHARE) // max(1, token_bytes)
    context = min(options.context_tokens or trained, trained)  # (1), (2)
    if options.context_tokens or options.kv_tokens:
        total = options.kv_tokens or max(context, min(context * options.sequences, _KEPT))
        needed = min(total, context) if not options.kv_tokens else total
    else:
        context = max(min(context, most), min(_FEWEST, trained))  # (3)
        total = max(context, min(context * options.sequences, _KEPT))
        needed = min(_FEWEST, context)
    if needed * token_bytes > free * (1.0 if options.context_tokens or options.kv_tokens else _SHARE):
        raise EngineUnavailable(
            f"a context of {needed} tokens needs {needed * token_bytes // _MB} MB of KV cache beside "
            f"{weights_bytes // _MB} MB of weights, and {free // _MB} MB of memory are free; "
            "set engine.context_tokens lower, or use a smaller model"
        )
    if not options.kv_tokens:
        total = max(min(total, most), needed)
    context = min(context, total)
    return MemoryPlan(context=context, total=total, prefix_bytes=min(options.prefix_cache_bytes, free // 8))
