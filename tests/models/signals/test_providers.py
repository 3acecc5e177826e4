"""Which processor runs a learned signal."""

from __future__ import annotations

import pytest

pytest.importorskip("onnxruntime")

from causeway_server.models.signals.onnx_graph import SMALL_BYTES, choose_providers, short_names

TENSORRT, CUDA, CPU = "TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"


@pytest.mark.parametrize(
    ("available", "chosen"),
    [
        ([CPU, CUDA, TENSORRT], [TENSORRT, CUDA, CPU]),
        ([CUDA, CPU], [CUDA, CPU]),
        ([CPU], [CPU]),
        (["AzureExecutionProvider"], [CPU]),
    ],
)
def test_the_best_provider_comes_first_and_the_cpu_last(available: list[str], chosen: list[str]) -> None:
    assert choose_providers(SMALL_BYTES, available) == chosen
    assert choose_providers(SMALL_BYTES - 1, available) == [CPU]
    assert short_names(chosen)[-1] == "CPU"
