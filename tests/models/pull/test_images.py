"""From a file of torch to an image classifier in ONNX: small networks of the same form, and files that lie."""

from __future__ import annotations

import importlib.util
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from causeway_server.models.catalog.artifact import ArtifactError
from causeway_server.models.pull.efficientnet import read_tensors, write_classifier

torch = pytest.importorskip("torch", reason="needs torch, which makes models (extra train)")
onnxruntime = pytest.importorskip("onnxruntime")

pytestmark = pytest.mark.slow  # torch

SIDE, LABELS = 16, ("cat", "dog", "invoice")
STAGES = ((1, 1), (2, 2))
_CHANNELS = ((4, 6), (6, 8), (8, 8))  # of the blocks, in and out


def state() -> dict[str, Any]:
    """Random weights with the names of efficientnet_lite_pytorch."""
    torch.manual_seed(7)
    found: dict[str, Any] = {}

    def convolution(name: str, norm: str, outputs: int, inputs: int, side: int) -> None:
        found[f"{name}.weight"] = torch.randn(outputs, inputs, side, side) / (inputs * side * side) ** 0.5
        found[f"{norm}.weight"], found[f"{norm}.bias"] = torch.rand(outputs) + 0.5, torch.randn(outputs) / 4
        found[f"{norm}.running_mean"], found[f"{norm}.running_var"] = torch.randn(outputs) / 4, torch.rand(outputs) + 1
        found[f"{norm}.num_batches_tracked"] = torch.tensor(9)

    convolution("_conv_stem", "_bn0", 4, 3, 3)
    for number, (inputs, outputs) in enumerate(_CHANNELS):
        block, inner = f"_blocks.{number}", inputs * (1 if number == 0 else 2)
        if number:
            convolution(f"{block}._expand_conv", f"{block}._bn0", inner, inputs, 1)
        convolution(f"{block}._depthwise_conv", f"{block}._bn1", inner, 1, 3 if number < 2 else 5)
        convolution(f"{block}._project_conv", f"{block}._bn2", outputs, inner, 1)
    convolution("_conv_head", "_bn1", 12, 8, 1)
    found["_fc.weight"], found["_fc.bias"] = torch.randn(3, 12), torch.randn(3)
    return found


def reference(weights: dict[str, Any], pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same network by torch's own operators, with TensorFlow's padding."""
    functional = torch.nn.functional

    def convolution(value: Any, name: str, norm: str, stride: int = 1, groups: int = 1) -> Any:
        kernel = weights[f"{name}.weight"]
        side, size = kernel.shape[-1], value.shape[-1]
        pad = max((-(-size // stride) - 1) * stride + side - size, 0)
        value = functional.pad(value, (pad // 2, pad - pad // 2, pad // 2, pad - pad // 2))
        value = functional.conv2d(value, kernel, stride=stride, groups=groups)
        parts = (weights[f"{norm}.{part}"] for part in ("running_mean", "running_var", "weight", "bias"))
        return functional.batch_norm(value, *parts, eps=1e-3)

    value = torch.from_numpy((pixels.astype(np.float32) - 127) / 128).permute(2, 0, 1)[None]
    value = functional.relu6(convolution(value, "_conv_stem", "_bn0", 2))
    for number, (inputs, outputs) in enumerate(_CHANNELS):
        block, before, stride = f"_blocks.{number}", value, 2 if number == 1 else 1
        if number:
            value = functional.relu6(convolution(value, f"{block}._expand_conv", f"{block}._bn0"))
        value = functional.relu6(
            convolution(value, f"{block}._depthwise_conv", f"{block}._bn1", stride, value.shape[1])
        )
        value = convolution(value, f"{block}._project_conv", f"{block}._bn2")
        value = value + before if stride == 1 and inputs == outputs else value
    features = functional.relu6(convolution(value, "_conv_head", "_bn1")).mean((2, 3))
    return torch.softmax(features @ weights["_fc.weight"].T + weights["_fc.bias"], 1)[0].numpy(), features[0].numpy()


def test_the_graph_computes_what_the_network_of_the_file_does(tmp_path: Path) -> None:
    weights = state()
    torch.save(weights, tmp_path / "net.pth", _use_new_zipfile_serialization=False)
    write_classifier(read_tensors(tmp_path / "net.pth"), LABELS, tmp_path / "net.onnx", STAGES, SIDE)
    session = onnxruntime.InferenceSession(str(tmp_path / "net.onnx"), providers=["CPUExecutionProvider"])
    assert session.get_modelmeta().custom_metadata_map["labels"].split("\n") == list(LABELS)
    pixels = np.random.default_rng(3).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    found = session.run(["probabilities", "features"], {"pixels": pixels})
    for one, expected in zip(found, reference(weights, pixels), strict=True):
        np.testing.assert_allclose(one, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(importlib.util.find_spec("PIL") is None, reason="Pillow is not installed (extra images)")
@pytest.mark.parametrize("size", [(1, 1), (400, 3), (30, 40)])
def test_an_image_of_any_form_has_its_probable_labels_best_first(tmp_path: Path, size: tuple[int, int]) -> None:
    from causeway_server.models.parts.encoders.images import ImageClassifier
    from causeway_server.models.parts.process.messages import ImagePixels

    weights = {name: value.numpy().astype(np.float32) for name, value in state().items()}
    write_classifier(weights, LABELS, tmp_path / "net.onnx", STAGES, SIDE)
    classify = ImageClassifier(tmp_path / "net.onnx", threads=1)
    found = classify(ImagePixels(bytes(range(3)) * (size[0] * size[1]), *size))
    assert found
    assert {label.name for label in found} <= set(LABELS)
    assert [label.probability for label in found] == sorted((label.probability for label in found), reverse=True)
    assert sum(label.probability for label in found) <= 1.001


def test_missing_weights_and_labels_are_named(tmp_path: Path) -> None:
    weights = {name: value.numpy().astype(np.float32) for name, value in state().items()}
    with pytest.raises(ArtifactError, match="2 labels for 3 classes"):
        write_classifier(weights, LABELS[:2], tmp_path / "net.onnx", STAGES, SIDE)
    del weights["_blocks.1._bn1.bias"]
    with pytest.raises(ArtifactError, match=r"_blocks\.1\._bn1\.bias"):
        write_classifier(weights, LABELS, tmp_path / "net.onnx", STAGES, SIDE)
    assert not (tmp_path / "net.onnx").exists()


class Bad:
    """Unpickling it would run a program."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("it ran",)


def test_a_file_that_holds_more_than_tensors_is_refused_and_nothing_of_it_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"net": Bad()}, tmp_path / "bad.pth", _use_new_zipfile_serialization=False)
    torch.save(state(), tmp_path / "archive.pth")
    (tmp_path / "text.pth").write_bytes(b"hello")
    old = io.BytesIO()
    whole: tuple[object, ...] = (0x1950A86A20F9469CFC6C, 1001, {}, Bad())
    for one in whole:
        pickle.dump(one, old, protocol=2)
    (tmp_path / "old.pth").write_bytes(old.getvalue())
    for name in ("bad", "archive", "text", "old"):
        with pytest.raises(ArtifactError, match=f"{name}\\.pth"):
            read_tensors(tmp_path / f"{name}.pth")
    assert capsys.readouterr().out == ""
