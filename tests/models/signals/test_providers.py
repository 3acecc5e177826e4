"""Which processor runs a learned signal: the fastest, measured once."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

pytest.importorskip("onnxruntime")

import onnxruntime

from causeway_server.models.catalog.artifact import find_artifact
from causeway_server.models.signals.onnx_graph import OnnxGraph
from causeway_server.models.signals.providers import CPU, cache_file, fastest, known_times, short_name

TENSORRT, CUDA = "TensorrtExecutionProvider", "CUDAExecutionProvider"
GRAPH = find_artifact("edge-quality").path


class Port:
    name, shape = "ids", ["n"]

    def __init__(self, kind: str = "tensor(int64)") -> None:
        self.type = kind


class Bench:
    """Sessions that take `seconds` by provider, of a clock that only they turn; a fault is raised instead."""

    def __init__(self, seconds: dict[str, float | Exception], kind: str = "tensor(int64)") -> None:
        self.seconds, self.kind = seconds, kind
        self.now, self.opened = 0.0, list[str]()

    def open(self, provider: str) -> _Session:
        self.opened.append(provider)
        return _Session(self, self.seconds[provider])

    def choose(self, cache: Path, *gpus: str) -> str:
        return fastest(GRAPH, self.open, cache, [*gpus, CPU], lambda: self.now)


class _Session:
    def __init__(self, bench: Bench, seconds: float | Exception) -> None:
        self._bench, self._seconds = bench, seconds

    def get_inputs(self) -> list[Port]:
        return [Port(self._bench.kind)]

    def run(self, outputs: None, inputs: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.int64]]]) -> None:
        assert inputs["ids"].shape == (16,)
        if isinstance(self._seconds, Exception):
            raise self._seconds
        self._bench.now += self._seconds


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "times.json"


@pytest.mark.parametrize(
    ("cuda", "tensorrt", "chosen"),
    [(50e-6, 30e-6, TENSORRT), (30e-6, 50e-6, CUDA), (90e-6, 95e-6, CPU), (200e-6, 300e-6, CPU)],
)
def test_a_gpu_runs_the_graph_only_where_it_is_clearly_faster(
    cache: Path, cuda: float, tensorrt: float, chosen: str
) -> None:
    bench = Bench({CPU: 100e-6, CUDA: cuda, TENSORRT: tensorrt})
    assert bench.choose(cache, TENSORRT, CUDA) == chosen
    found, times = known_times(GRAPH, cache, [CUDA, TENSORRT, CPU])
    assert found == chosen
    assert times == pytest.approx({CPU: 100e-6, CUDA: cuda, TENSORRT: tensorrt})


def test_it_is_measured_once_for_each_graph_and_device(cache: Path) -> None:
    bench = Bench({CPU: 100e-6, CUDA: 30e-6, TENSORRT: 10e-6})
    assert [bench.choose(cache, CUDA) for _ in range(3)] == [CUDA] * 3
    assert bench.opened == [CPU, CUDA]
    assert bench.choose(cache, TENSORRT, CUDA) == TENSORRT
    cache.write_bytes(b"damaged")
    assert bench.choose(cache, CUDA) == CUDA
    assert bench.opened == [CPU, CUDA, CPU, TENSORRT, CUDA, CPU, CUDA]


def test_without_a_gpu_nothing_is_measured(cache: Path) -> None:
    bench = Bench({})
    assert bench.choose(cache) == CPU
    assert (bench.opened, cache.exists()) == ([], False)


@pytest.mark.parametrize(
    "broken",
    [
        Bench({CPU: 100e-6, CUDA: RuntimeError("no kernel image")}),
        Bench({CPU: 100e-6}),
        Bench({CPU: 100e-6, CUDA: 30e-6}, kind="tensor(string)"),
    ],
    ids=["its run fails", "it does not open", "inputs of an unknown kind"],
)
def test_a_gpu_that_cannot_run_the_graph_leaves_it_to_the_cpu(
    broken: Bench, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert broken.choose(cache, CUDA) == CPU
    assert f"CUDA cannot run {GRAPH}" in caplog.text


def test_a_cache_that_cannot_be_written_costs_a_measurement_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert Bench({CPU: 100e-6, CUDA: 30e-6}).choose(tmp_path / "file" / "times.json", CUDA) == CUDA


def test_real_sessions_are_measured(cache: Path) -> None:
    """The CPU stands for the GPU."""

    def opened(_: str) -> object:
        return onnxruntime.InferenceSession(str(GRAPH), providers=[CPU])

    fastest(GRAPH, opened, cache, [CUDA, CPU])
    (times,) = msgspec.json.decode(cache.read_bytes(), type=dict[str, dict[str, float]]).values()
    assert times.keys() == {CPU, CUDA}
    assert min(times.values()) > 0


@pytest.mark.filterwarnings("ignore:Specified provider")
def test_a_build_whose_gpu_does_not_start_runs_the_graph_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime itself only prints a line, and falls back."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, CPU])
    graph = OnnxGraph(GRAPH)
    assert graph({graph.inputs[0]: np.array([1, 2], np.int64)}).size > 0
    assert [short_name(one) for one in known_times(GRAPH, cache_file(), [CUDA])[1]] == ["CPU"]
