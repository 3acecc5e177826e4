"""What this machine can run: threads from idle cores, tokens from free memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from causeway_server.models.llama_cpp.native.resources import (
    cgroup_quota,
    check_weights_fit,
    choose_threads,
    plan_memory,
)
from causeway_server.models.llama_cpp.protocol import EngineOptions
from causeway_server.router.errors import EngineUnavailable

MB = 1024 * 1024


def options(**fields: int) -> EngineOptions:
    return EngineOptions(model_path="x", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("allowed", "busy", "threads"), [(1.0, 0.0, 1), (2.0, 0.1, 1), (2.0, 2.0, 1), (0.5, 0.0, 1), (64.0, 64.0, 1)]
)
def test_a_busy_or_small_machine_gets_one_thread(allowed: float, busy: float, threads: int) -> None:
    assert choose_threads(0, allowed, busy) == threads


def test_configured_threads_are_cut_to_the_allowed_cores() -> None:
    assert choose_threads(2, allowed=4.0, busy=4.0) == 2
    assert choose_threads(16, allowed=4.0, busy=0.0) == 4


def test_the_cgroup_s_quota_is_read(tmp_path: Path) -> None:
    """`max` and a missing file mean no limit."""
    file = tmp_path / "cpu.max"
    assert cgroup_quota(file) == float("inf")
    file.write_text("max 100000\n")
    assert cgroup_quota(file) == float("inf")
    file.write_text("150000 100000\n")
    assert cgroup_quota(file) == 1.5


def test_the_model_s_own_context_is_the_default() -> None:
    plan = plan_memory(
        options(sequences=4), trained_context=2048, kv_bytes_per_token=4096, weights_bytes=3 * MB, free=8000 * MB
    )
    assert (plan.context_tokens, plan.kv_tokens) == (2048, 8192)


def test_little_memory_shortens_the_context_before_it_is_an_error() -> None:
    plan = plan_memory(
        options(), trained_context=131072, kv_bytes_per_token=32768, weights_bytes=700 * MB, free=200 * MB
    )
    assert 256 <= plan.context_tokens < 131072
    assert plan.kv_tokens * 32768 <= 200 * MB
    with pytest.raises(EngineUnavailable, match=r"256 tokens needs 8 MB.*4 MB of memory are free"):
        plan_memory(options(), trained_context=131072, kv_bytes_per_token=32768, weights_bytes=700 * MB, free=4 * MB)


def test_a_conversation_that_fills_the_context_is_kept_for_its_next_turn() -> None:
    """Its prefix takes what its KV cells took: 100 MB for 8,000 tokens of a model of 0.5 billion parameters."""

    def prefix_bytes(free_mb: int, **fields: int) -> int:
        plan = plan_memory(
            options(**fields), trained_context=32768, kv_bytes_per_token=12288, weights_bytes=0, free=free_mb * MB
        )
        return plan.prefix_bytes

    assert prefix_bytes(20_000) == 32768 * 12288
    assert prefix_bytes(2000) == 250 * MB  # an eighth of the free memory
    assert prefix_bytes(20_000, context_tokens=512, sequences=1) == 64 * MB
    assert prefix_bytes(20_000, prefix_cache_bytes=0) == 0


def test_a_configured_context_is_kept_or_refused() -> None:
    """Never reduced silently, unless the model's own context is shorter."""
    configured = options(context_tokens=4096, sequences=2)

    def context(trained: int, free_mb: int) -> int:
        plan = plan_memory(
            configured, trained_context=trained, kv_bytes_per_token=4096, weights_bytes=0, free=free_mb * MB
        )
        return plan.context_tokens

    assert context(trained=8192, free_mb=1000) == 4096
    assert context(trained=2048, free_mb=1000) == 2048
    with pytest.raises(EngineUnavailable, match=r"4096 tokens needs 16 MB.*10 MB"):
        context(trained=8192, free_mb=10)


def test_weights_that_do_not_fit_are_refused_before_they_are_read() -> None:
    with pytest.raises(EngineUnavailable, match=r"needs 700 MB, but only 300 MB"):
        check_weights_fit(Path("m.gguf"), 700 * MB, 300 * MB)
