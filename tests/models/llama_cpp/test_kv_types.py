"""Keys and values at q8_0: half the memory, nearly the same answers, and a refusal where a model's heads do not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from causeway_server.models.llama_cpp.native.weights import Weights
from causeway_server.router.errors import EngineUnavailable

from .conftest import Rig
from .tiny_gguf import write_tiny_gguf

PROMPT = "turn on the light in the kitchen and set the alarm for six " * 3


def test_q8_0_takes_about_half_and_answers_nearly_the_same(rig: Rig, make_rig: Callable[..., Rig]) -> None:
    small = make_rig(kv_type="q8_0")
    fields: dict[str, Any] = {"max_tokens": 1, "logprobs": 5}
    exact, rounded = (each.run(PROMPT, **fields).logprobs[0].logprob for each in (rig, small))
    assert rounded == pytest.approx(exact, abs=0.2)
    saved = [each.engine.core.prefix_cache for each in (rig, small)]
    assert saved[0] is not None
    assert saved[1] is not None
    assert 0.5 < saved[1].bytes / saved[0].bytes < 0.6


def test_prefixes_are_restored_at_q8_0(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(kv_type="q8_0")
    first, again = (rig.run(PROMPT, max_tokens=20, ignore_eos=True) for _ in range(2))
    assert again.end.cached_tokens > 16
    assert again.text == first.text


def test_heads_that_q8_0_cannot_hold_are_refused(tmp_path: Path) -> None:
    weights = Weights(write_tiny_gguf(tmp_path / "narrow.gguf", heads=4))
    assert weights.kv_bytes_per_token("f16") == 2 * 2 * 64 * 2
    with pytest.raises(EngineUnavailable, match=r"heads have 16. Set engine.kv_type to f16"):
        weights.kv_bytes_per_token("q8_0")
    weights.close()
