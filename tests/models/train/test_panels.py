"""Training on drawn panels at a small scale: panels → network → two ONNX files → a model with a projector."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest

from tests.models.train.requirements import need_training_packages

need_training_packages()

import onnxruntime  # noqa: E402
import torch  # noqa: E402
from click.testing import CliRunner  # noqa: E402

from models.catalog.artifact import ArtifactError, find_artifact  # noqa: E402
from models.catalog.projector import find_projector  # noqa: E402
from models.cli.commands import main  # noqa: E402
from models.llama_cpp.native.vocabulary import Vocabulary  # noqa: E402
from models.llama_cpp.native.weights import Weights  # noqa: E402
from models.modalities.encoders.projector import PictureProjector  # noqa: E402
from models.modalities.process.messages import Picture, Projected, ProjectPicture, WorkerSpec  # noqa: E402
from models.publish.publish import publish_gguf  # noqa: E402
from models.train.export.embedding_rows import embedding_rows  # noqa: E402
from models.train.panels.drawing import SIDE, as_input, caption, draw_panel, panels  # noqa: E402
from models.train.panels.network import SIDE as INPUT  # noqa: E402
from models.train.panels.network import PanelReader, write_encoder, write_projector  # noqa: E402
from models.train.panels.run import caption_rows  # noqa: E402
from tests.engine.tiny_gguf import write_tiny_gguf  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models: `tiny` with a projector, and its encoder."""
    folder = tmp_path_factory.mktemp("panels")
    models = folder / "models"
    publish_gguf(write_tiny_gguf(folder / "tiny.gguf"), "tiny", models)
    command = ["train-panels", "--model", "tiny", "--run", str(folder / "run"), "--to", str(models)]
    result = CliRunner().invoke(main, [*command, "--models", str(models), "--panels", "64", "--epochs", "1"])
    assert result.exit_code == 0, result.output
    return models


def test_panels_are_those_of_their_seed() -> None:
    assert panels(3, 5) == panels(3, 5) != panels(3, 6)
    (panel,) = panels(1, 5)
    assert draw_panel(panel).tobytes() == draw_panel(panel).tobytes()
    assert draw_panel(panel).size == (3 * SIDE, SIDE)


def test_what_it_publishes_works_together(trained: Path) -> None:
    """A picture becomes the caption: its words exactly, its digits as the network sees them."""
    projector = find_projector("tiny", [trained])
    assert projector is not None
    worker = PictureProjector(
        WorkerSpec("", options={"encoder": str(projector.encoder), "projector": str(projector.path)})
    )
    found: list[bytes] = []
    for drawn in map(draw_panel, panels(2, 5)):
        job = ProjectPicture(Picture(drawn.tobytes(), drawn.width, drawn.height))
        projected = worker.run(job, link=None)  # type: ignore[arg-type]
        assert isinstance(projected, Projected)
        found.append(projected.vectors)
    weights = find_artifact("tiny", [trained]).path
    with contextlib.closing(Weights(weights)) as loaded:
        ids = Vocabulary(loaded.pointer).encode(caption(["00", "00", "00"]), special=False)
    vectors = np.frombuffer(found[0], "<f4").reshape(projector.tokens, -1)
    words = np.array([token for pair in caption_rows(weights).places for token in pair])
    rest = np.setdiff1d(np.arange(len(ids)), words)
    np.testing.assert_array_equal(vectors[rest], embedding_rows(weights)[ids][rest])
    assert found[0] != found[1]


def test_the_files_calculate_what_the_network_does(tmp_path: Path) -> None:
    rows = caption_rows(write_tiny_gguf(tmp_path / "tiny.gguf"))
    torch.manual_seed(3)
    reader = PanelReader(rows.digits)
    write_encoder(reader, tmp_path / "encoder.onnx")
    write_projector(reader, rows, tmp_path / "projector.onnx")
    pixels = np.stack([as_input(panel, INPUT) for panel in panels(3, 1)])
    encoder, projector = (onnxruntime.InferenceSession(tmp_path / f"{name}.onnx") for name in ("encoder", "projector"))
    (features,) = encoder.run(["features"], {"pixels": pixels})
    (embeddings,) = projector.run(["embeddings"], {"features": features})
    with torch.no_grad():
        expected = reader(torch.from_numpy(pixels)).numpy()
    places = np.array(rows.places)
    np.testing.assert_allclose(embeddings[:, places], expected, atol=1e-4)


def test_a_model_whose_tokenizer_joins_digits_is_refused(tmp_path: Path) -> None:
    joined = write_tiny_gguf(tmp_path / "tiny.gguf", words=["12"])
    with pytest.raises(ArtifactError, match="token of its own"):
        caption_rows(joined)


def test_the_models_that_ship_stay_as_they_are(tmp_path: Path) -> None:
    command = ["train-panels", "--model", "assistant", "--run", str(tmp_path), "--to", str(tmp_path / "models")]
    result = CliRunner().invoke(main, [*command, "--panels", "64", "--epochs", "1"])
    assert result.exit_code == 1
    assert "makes a copy that can have a projector" in result.output
