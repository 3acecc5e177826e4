"""How many layers `auto` offloads, from sizes and free memory; a build without a GPU backend offloads none."""

from __future__ import annotations

from pathlib import Path

import pytest

from causeway_server.models.llama_cpp.native.resources import (
    choose_layers,
    fitting_layers,
    layer_bytes,
    list_gpus,
    probe_gpus,
)
from causeway_server.models.llama_cpp.protocol import EngineOptions

from .tiny_gguf import vocabulary

GIB = 2**30


def test_the_last_layers_that_fit_are_offloaded() -> None:
    """A tenth and half a GiB of the free memory stay free."""
    layers = [GIB] * 10
    assert [fitting_layers(layers, free * GIB) for free in (0, 1, 2, 6, 11, 12, 80)] == [0, 0, 1, 4, 9, 10, 10]
    assert fitting_layers([GIB, GIB, 8 * GIB], 7 * GIB) == 0
    assert fitting_layers([8 * GIB, GIB, GIB], 7 * GIB) == 2


def test_sizes_are_those_of_the_file_and_of_its_part_of_the_cache(tiny_model: Path) -> None:
    def sizes(**changes: object) -> list[int]:
        return layer_bytes(EngineOptions(model_path=str(tiny_model), kv_tokens=1000, **changes))  # type: ignore[arg-type]

    weights = 4 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64)
    first, second, output = sizes()
    assert first == second == weights + 1000 * 2 * 64 * 2
    assert sizes(kv_type="q8_0")[0] == weights + 1000 * 2 * 64 * 34 // 32
    assert output == 4 * 64 * len(vocabulary()[0])


@pytest.mark.slow
def test_without_a_gpu_nothing_is_offloaded(tiny_model: Path) -> None:
    options = EngineOptions(model_path=str(tiny_model))
    assert options.gpu_layers == "auto"
    if not list_gpus():
        assert choose_layers(options) == 0
    assert choose_layers(EngineOptions(model_path=str(tiny_model), gpu_layers=7)) == 7
    report = probe_gpus()
    assert [gpu.name for gpu in report.gpus] == [gpu.name for gpu in list_gpus()]
    assert "CPU" in report.backends
