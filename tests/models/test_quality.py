"""edge.quality: features, the ONNX graph, calibration, and the tie to one version of a model."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from models.quality import BUCKETS, Quality, features
from models.spec import ArtifactError, find_artifact

pytest.importorskip("onnxruntime")
torch = pytest.importorskip("torch")
pytest.importorskip("onnx")

from models.publish import publish_signal  # noqa: E402
from models.train.quality import Estimator, Judged, calibration_error, train_on, write_onnx  # noqa: E402

RIGHT = [f"turn {way} the {what}" for way in ("on", "off", "up") for what in ("light", "radio", "heater", "fan")]
WRONG = [f"explain {what} to {whom}" for what in ("gravity", "jazz", "tax", "dna") for whom in ("me", "her", "us")]


def test_features_are_buckets_whatever_the_text() -> None:
    """Never empty, always inside the table, bounded for long prompts, blind to case."""
    for text in ("", "   ", "Turn ON", "日本語", "word " * 5000):
        found = features(text)
        assert found.dtype == np.int64
        assert 1 <= len(found) <= 300
        assert found.min() >= 0
        assert found.max() < BUCKETS
    assert features("Turn ON").tolist() == features("turn on").tolist()


def test_the_graph_computes_what_torch_computed(tmp_path: Path) -> None:
    """Up to the int8 rounding of the table."""
    torch.manual_seed(1)
    estimator = Estimator().eval()
    write_onnx(estimator, tmp_path / "q.onnx")
    quality = Quality(tmp_path / "q.onnx")
    for text in (*RIGHT, *WRONG, ""):
        with torch.no_grad():
            wanted = float(estimator([text]).sigmoid())
        assert quality(text) == pytest.approx(wanted, abs=0.01)


def test_it_learns_what_is_answered_rightly(tmp_path: Path) -> None:
    """Trained on right and wrong prompts it tells them apart, also those it has not seen, and gives probabilities."""
    judged = [Judged(text, True) for text in RIGHT] + [Judged(text, False) for text in WRONG]
    fit = train_on(judged * 20, judged, tmp_path / "q.onnx", seed=3, say=lambda _: None)
    assert fit.auroc > 0.95
    quality = Quality(tmp_path / "q.onnx")
    assert quality("turn on the oven") > 0.6
    assert quality("explain dna to him") < 0.4


def test_calibration_error_is_the_mean_gap() -> None:
    """Promised 0.85 and held half the time is a gap of 0.35; a kept promise is none."""
    told = np.array([0.85] * 4)
    assert calibration_error(told, np.array([True, True, False, False])) == pytest.approx(0.35)
    assert calibration_error(np.array([0.5, 0.5]), np.array([True, False])) == pytest.approx(0.0)


def test_an_estimator_judges_one_version_only(tmp_path: Path) -> None:
    """Beside any other weights it refuses to load."""
    write_onnx(Estimator(), tmp_path / "q.onnx")
    model = find_artifact("assistant")
    signal = publish_signal(tmp_path / "q.onnx", "signal", tmp_path, model, {"auroc": 0.9})
    assert 0.0 <= Quality.beside(signal, model)("lights on") <= 1.0
    other = msgspec.structs.replace(model, manifest=msgspec.structs.replace(model.manifest, sha256="0" * 64))
    with pytest.raises(ArtifactError, match="another version"):
        Quality.beside(signal, other)


def test_a_broken_graph_is_an_error_of_ours(tmp_path: Path) -> None:
    """Junk and a missing file name the path."""
    (tmp_path / "junk.onnx").write_bytes(b"junk")
    for name in ("junk.onnx", "gone.onnx"):
        with pytest.raises(ArtifactError, match=name):
            Quality(tmp_path / name)
