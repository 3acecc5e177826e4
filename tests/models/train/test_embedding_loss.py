"""The embedding loss: vectors are computed once, and a network learns to predict them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from .requirements import need_training_packages

need_training_packages()

import torch  # noqa: E402

from causeway_train.assistant.mixture import Example  # noqa: E402
from causeway_train.assistant.trainer import Trainer, TrainingPlan  # noqa: E402
from causeway_train.auxiliary_losses.embedding_loss import (  # noqa: E402
    NO_EMBEDDING,
    TEXTS,
    VECTORS,
    EmbeddingProjection,
    SentenceEmbeddings,
)
from causeway_train.network.llama import Llama, LlamaConfig  # noqa: E402

pytestmark = pytest.mark.slow

WORDS = ["louder", "softer", "six am"]


def embeddings() -> SentenceEmbeddings:
    return SentenceEmbeddings(
        WORDS, torch.nn.functional.normalize(torch.randn(3, 16, generator=torch.manual_seed(2)), dim=-1)
    )


def test_vectors_in_the_folder_are_not_computed_again(tmp_path: Path) -> None:
    """They are scaled to length 1; other texts have no vector."""
    (tmp_path / TEXTS).write_text('["louder","softer"]')
    np.save(tmp_path / VECTORS, np.array([[3.0, 4.0], [0.0, 2.0]], dtype=np.float32))
    known = SentenceEmbeddings.load_or_compute(tmp_path / "missing.onnx", ["anything"], tmp_path)
    assert known.vectors[known.index_of("louder")].tolist() == pytest.approx([0.6, 0.8])
    assert known.index_of("anything") == NO_EMBEDDING


def test_texts_without_a_vector_have_no_loss() -> None:
    """They do not change the mean over the others either."""
    projection = EmbeddingProjection(8, embeddings())
    states = torch.randn(2, 8)
    assert float(projection.loss(states, [NO_EMBEDDING, NO_EMBEDDING])) == 0.0
    assert float(projection.loss(states, [1, NO_EMBEDDING]).detach()) == pytest.approx(
        float(projection.loss(states[:1], [1]).detach())
    )


def test_a_network_learns_embeddings_and_its_projection_resumes(tmp_path: Path) -> None:
    """The projection is part of the checkpoint."""
    batch = [Example([1, 5 + index, 2], [7, 3], "hwu64", embedding=index) for index in range(3)]
    network = Llama(LlamaConfig(vocabulary=64, width=64, layers=2, heads=1, hidden=96))
    plan = TrainingPlan(
        minutes=5, steps=40, threads=1, warmup_steps=2, dropout=0.0, embedding_weight=1.0, vector_lr=1e-2
    )
    losses: list[float] = []
    trainer = Trainer(network, plan, tmp_path, embeddings=embeddings())
    before = float(trainer.loss(batch).detach())
    trainer.run(lambda: batch, lambda _, loss: losses.append(loss))
    assert float(trainer.loss(batch).detach()) < before / 4
    resumed = Trainer(Llama(network.shape), plan, tmp_path, embeddings=embeddings())
    assert resumed.resume()
    assert float(resumed.loss(batch).detach()) == pytest.approx(float(trainer.loss(batch).detach()), rel=0.2, abs=0.1)
