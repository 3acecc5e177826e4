"""Estimates of n models: the fit on graded prompts, the choice on held-out rows, the file, a device that reads it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

pytest.importorskip("onnxruntime")

from causeway_server.edge_node.signals.candidates import CandidateEstimates
from causeway_server.models.catalog.artifact import ArtifactError, ArtifactUnreadable, find_signal
from causeway_server.models.cli.commands import main
from causeway_server.models.signals.candidates import (
    CandidateEstimator,
    CandidateParameters,
    Logistic,
    Neighbours,
    find_candidates,
)
from causeway_server.models.signals.encoder import SentenceEncoder
from causeway_server.router.policy.compiled import parse_policy
from causeway_server.router.types import AttemptRecord, Message, Request
from causeway_train.calibrate.candidates import GradedPrompt, fit_candidates, read_graded

POLICY = parse_policy("""
version: 1
name: best
targets:
  small: {at: edge, model: small}
  medium: {at: cloud, model: medium}
  large: {at: cloud, model: large}
routes:
  - {name: scored, use: {best_of: [small, medium, large]}}
""")
THREE = ("small", "medium", "large")
KINDS = {"What is the colour of a {}?": 0, "Translate the word {} into French.": 1, "Integrate x to the power {}.": 2}


def graded(count: int, seed: int = 1) -> list[GradedPrompt]:
    """Each model is good at its own kind of prompt, and right by chance in 30 % of the others."""
    draw, rows = random.Random(seed), []
    for number in range(count):
        text, best = list(KINDS.items())[number % 3]
        grades = {name: float(draw.random() < (0.9 if at == best else 0.3)) for at, name in enumerate(THREE)}
        rows.append(GradedPrompt(text.format(number), grades, {"small": 10, "medium": 20}))
    return rows


def write(path: Path, rows: list[GradedPrompt]) -> Path:
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models with estimates of three models."""
    folder = tmp_path_factory.mktemp("candidates")
    file = write(folder / "graded.jsonl", graded(240))
    result = CliRunner().invoke(main, ["candidates", "--graded", str(file), "--to", str(folder / "to")])
    assert result.exit_code == 0, result.output
    assert "Mean grade of the chosen model: 0." in result.output
    return folder / "to"


def test_the_chosen_estimator_tells_three_models_apart(published: Path) -> None:
    estimator = find_candidates(THREE, (published,))
    for text, best in KINDS.items():
        qualities = estimator.qualities(text.format("seven"))
        assert max(qualities, key=qualities.__getitem__) == THREE[best]
    card = (published / "candidates" / "README.md").read_text()
    assert "Log loss on the rows that chose: constant" in card


def test_the_report_is_of_rows_that_neither_the_fit_nor_the_choice_saw() -> None:
    """Both kinds of estimators compete, and the answers of the chosen model are better than any single one's."""
    encoder = SentenceEncoder(find_signal("embedding").path)
    _, report = fit_candidates(graded(240), encoder, seed=1)
    assert report.rows == 60
    assert {name.split()[-1] for name in report.losses} >= {"constant", "neighbours", "1"}
    assert report.losses[report.chosen] < report.losses["constant"]
    assert max(report.grades.values()) < report.best <= report.perfect


def parameters(folder: Path) -> CandidateParameters:
    return msgspec.json.decode((folder / "candidates" / "model.json").read_bytes(), type=CandidateParameters)


def replaced(published: Path, folder: Path, content: bytes) -> Path:
    """Return a copy of the artifact with another content."""
    manifest = msgspec.json.decode((published / "candidates" / "manifest.json").read_bytes(), type=object)
    (folder / "candidates").mkdir(parents=True, exist_ok=True)
    (folder / "candidates" / "manifest.json").write_text(json.dumps(manifest))
    (folder / "candidates" / "model.json").write_bytes(content)
    return folder


def changed(published: Path, **changes: object) -> bytes:
    fields = msgspec.json.decode((published / "candidates" / "model.json").read_bytes())
    return msgspec.json.encode(fields | changes)


UNREADABLE = {
    "a later version": {"version": 2},
    "an unknown key": {"later": True},
    "an unknown estimator": {"estimator": {"type": "forest"}},
    "no models": {"models": "three"},
}


@pytest.mark.parametrize("changes", UNREADABLE.values(), ids=UNREADABLE)
def test_a_device_refuses_a_file_that_it_cannot_read_and_keeps_the_last_good_one(
    published: Path, tmp_path: Path, changes: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    good = (published / "candidates" / "model.json").read_bytes()
    folder = replaced(published, tmp_path, good)
    estimates = CandidateEstimates((folder,))
    estimates.activate(POLICY)
    before = qualities(estimates)
    assert None not in before
    replaced(published, tmp_path, changed(published, **changes))
    with pytest.raises(ArtifactUnreadable):
        find_candidates(THREE, (folder,))
    estimates.activate(POLICY)
    assert qualities(estimates) == before
    assert "the previous one stays in use" in caplog.text
    fresh = CandidateEstimates((folder,))
    fresh.activate(POLICY)
    assert qualities(fresh) == [None, None, None]
    assert "in the order of its list" in caplog.text


def test_the_last_good_one_does_not_survive_its_models(published: Path, tmp_path: Path) -> None:
    """Another version of a model's weights: neither the file nor the estimates in use belong to it."""
    folder = replaced(published, tmp_path, changed(published, encoder_sha256="0" * 64))
    estimates = CandidateEstimates((folder,))
    estimates.activate(POLICY)
    assert qualities(estimates) == [None, None, None]
    with pytest.raises(ArtifactError, match="made for other weights of encoder"):
        find_candidates(THREE, (folder,))


def qualities(estimates: CandidateEstimates) -> list[float | None]:
    request = Request(kind="chat", model="auto", messages=(Message("user", "What is the colour of a sky?"),))
    return [one.quality for one in estimates.estimate(POLICY, request, 0.0)]


def test_estimates_have_lengths_and_measured_times(published: Path) -> None:
    """A failed attempt measures nothing; without new answers a time expires, so that the target is tried again."""
    estimates = CandidateEstimates((published,))
    estimates.activate(POLICY)
    estimates.observe([AttemptRecord("small", "edge", "done", 0.0, duration_ms=2000.0)], 10.0)
    estimates.observe([AttemptRecord("large", "cloud", "failed", 0.0, duration_ms=9.0)], 10.0)
    estimates.observe([AttemptRecord("elsewhere", "cloud", "done", 0.0, duration_ms=9.0)], 10.0)
    embedding = Request(kind="embedding", model="auto")
    found = estimates.estimate(POLICY, embedding, 10.0)
    assert [one.quality for one in found] == [None, None, None]
    assert [one.answer_tokens for one in found] == [10, 20, None]
    assert [one.latency_s for one in found] == [pytest.approx(2.0), None, None]
    assert estimates.estimate(POLICY, embedding, 1e6)[0].latency_s is None


@pytest.mark.parametrize(
    "estimator",
    [Logistic(()), Neighbours(3, 1.0, b"", b""), Neighbours(3, 1.0, b"\0" * 256, b"\0" * 8)],
    ids=["too few models", "no prompts", "too few grades"],
)
def test_numbers_that_do_not_fit_are_refused(published: Path, estimator: Logistic | Neighbours) -> None:
    wrong = msgspec.structs.replace(parameters(published), estimator=estimator)
    with pytest.raises(ArtifactError, match="estimates of 3 models"):
        CandidateEstimator(wrong, SentenceEncoder(find_signal("embedding").path))


def test_neighbours_answer_with_the_grades_of_the_nearest_prompts() -> None:
    encoder = SentenceEncoder(find_signal("embedding").path)
    import numpy as np

    vectors = np.array([encoder("the colour red"), encoder("a long integral")]) * 127
    grades = np.array([[1.0, 0.0], [0.0, 1.0]], np.float32)
    near = Neighbours(1, 0.0, np.rint(vectors).astype(np.int8).tobytes(), grades.tobytes())
    assert near((), encoder("the colour blue")) == (1.0, 0.0)
    assert near((), encoder("integral")) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "grades": {"small": 1.0}}, "must have small, medium, large"),
        ({"prompt": "a", "grades": {"small": 1.0, "medium": 2.0, "large": 0.0}}, "each from 0 to 1"),
        ({"prompt": "a"}, "grades"),
    ],
)
def test_graded_prompts_are_checked(tmp_path: Path, row: dict[str, object], message: str) -> None:
    file = write(tmp_path / "graded.jsonl", graded(120))
    file.write_bytes(file.read_bytes() + json.dumps(row).encode())
    with pytest.raises(ArtifactError, match=message):
        read_graded([file])
    with pytest.raises(ArtifactError, match="100 rows"):
        read_graded([write(tmp_path / "few.jsonl", graded(3))])
