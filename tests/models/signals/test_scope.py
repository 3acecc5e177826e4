"""Out-of-scope detection: from the prompt alone, and with a model's confidence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnxruntime")

from models.catalog.artifact import ArtifactError, verify_artifact
from models.function_calls.dataset import Row
from models.signals.encoder import SentenceEncoder
from models.signals.lookup import find_signal
from models.signals.scope import BUCKETS, ScopeEstimator, letters, words
from models.train.signals.encoder import write_table
from models.train.signals.scope import measure, scope_inputs, train_scope
from models.train.signals.scope_heads import IntentExamples, IntentHeads, TextFeatures
from router.types import Confidence

ROOMS = ("kitchen", "hall", "garage", "cellar", "attic", "bedroom", "office", "garden", "porch", "bathroom")
KINDS = {
    "light": "turn on the light in the {}",
    "clean": "sweep and mop the floor of my {}",
    "heat": "is it warm in {}",
}
ODD = [
    f"who wrote the {n} novel about {who}" for n in ("first", "last") for who in ("war", "love", "bees", "rome", "me")
]
INSIDE = [Row(text.format(room), kind, source="clinc150") for kind, text in KINDS.items() for room in ROOMS]
OUTSIDE = [Row(text, "oos", source="clinc150") for text in ODD]
WORDS = sorted({word for row in (*INSIDE, *OUTSIDE) for word in row.text.split()})


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> SentenceEncoder:
    """A table of random rows, one per word."""
    path = tmp_path_factory.mktemp("encoder") / "table.onnx"
    rows = np.random.default_rng(1).standard_normal((len(WORDS) + 1, 32)).astype(np.float32)
    write_table(rows, ["[UNK]", *WORDS], path)
    return SentenceEncoder(path)


def confidences(texts: Sequence[str]) -> list[Confidence]:
    """Return the confidences of a model that is unsure of exactly the texts that are out of scope."""
    return [Confidence(1, 0.2 if text in ODD else 0.9, -0.5, 0.5, 1.0, 0.7 if text in ODD else 0.1) for text in texts]


def test_it_learns_which_texts_no_intent_fits(encoder: SentenceEncoder, tmp_path: Path) -> None:
    """The model's confidence improves it."""
    taught, held = [*INSIDE[::2], *OUTSIDE[::2]], [*INSIDE[1::2], *OUTSIDE[1::2]]
    fit = train_scope(taught, held, encoder, confidences, tmp_path / "s.onnx", epochs=30)
    assert fit.auroc > 0.9
    assert fit.joined_auroc >= fit.half_auroc
    assert fit.intent > 0.9
    assert (fit.rows, fit.outside) == (20, 5)
    scope = ScopeEstimator(tmp_path / "s.onnx", encoder)
    assert scope("turn on the light in the kitchen") < 0.5 < scope("who wrote the first novel about rome")
    assert 0.0 <= scope("") <= 1.0
    assert measure(scope, held, confidences).auroc == fit.auroc


def test_the_graph_computes_what_the_heads_say(encoder: SentenceEncoder, tmp_path: Path) -> None:
    """Up to the rounding to int8."""
    train_scope([*INSIDE, *OUTSIDE], [*INSIDE, *OUTSIDE], encoder, confidences, tmp_path / "s.onnx", epochs=5)
    scope = ScopeEstimator(tmp_path / "s.onnx", encoder)
    texts = [row.text for row in INSIDE]
    intents = np.array([sorted(KINDS).index(row.intent) for row in INSIDE])
    views = TextFeatures.of(encoder, texts)
    heads = IntentHeads(views, intents, 1, 5)
    for text in ("turn on the light", "who wrote it", texts[3]):
        wanted = scope_inputs(heads, IntentExamples(views.vectors, intents), TextFeatures.of(encoder, [text]))[0]
        assert scope.novelty(text) == pytest.approx(tuple(wanted), abs=0.03)


def test_features_are_bounded_whatever_the_text() -> None:
    """Of a long text only the beginning counts; letters are never empty."""
    for text in ("", "x", "日本語", "word " * 5000, "x" * 1_000_000):
        assert 1 <= len(letters(text)) < 2000
        for found in (letters(text), words(text)):
            assert found.dtype == np.int64
            assert all(0 <= bucket < BUCKETS for bucket in found)


def test_figures_without_out_of_scope_rows_are_zero(encoder: SentenceEncoder, tmp_path: Path) -> None:
    train_scope([*INSIDE, *OUTSIDE], [*INSIDE, *OUTSIDE], encoder, confidences, tmp_path / "s.onnx", epochs=1)
    fit = measure(ScopeEstimator(tmp_path / "s.onnx", encoder), INSIDE, confidences)
    assert (fit.auroc, fit.joined_auroc, fit.outside) == (0.0, 0.0, 0)


def test_another_graph_is_refused(encoder: SentenceEncoder) -> None:
    with pytest.raises(ArtifactError, match="not an out-of-scope estimator"):
        ScopeEstimator(encoder.path, encoder)


def test_the_shipped_estimator_belongs_to_the_shipped_encoder() -> None:
    shipped = find_signal("scope")
    verify_artifact(shipped)
    scope = ScopeEstimator.for_encoder(shipped, find_signal("embedding"))
    assert scope("what is the exchange rate between dollars and euros") < scope("why do cats purr at their owners")
    with pytest.raises(ArtifactError, match="another version"):
        ScopeEstimator.for_encoder(shipped, shipped)
